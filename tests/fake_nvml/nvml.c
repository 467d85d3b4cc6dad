/* A libnvidia-ml.so.1 without a GPU: says what a script says, which it reads again at each call.
 *
 * The script is the file that FAKE_NVML names, one thing a line, `#` for a comment:
 *
 *     driver 570.86
 *     card uuid=GPU-a bus=00000000:01:00.0 name=RTX total=24 used=4 free=20 use=30 temp=50 power=90000 split=0
 *     instance uuid=MIG-a card=GPU-a gi=1 ci=0 total=10 used=1 free=9       of the card above
 *     process gpu=GPU-a pid=7 used=3
 *     event card=GPU-a xid=79 gi=1             kept until it was delivered; xid=0: a double-bit error
 *     error FUNCTION CODE [UUID]               what the function answers, for all or for one GPU
 *     hang FUNCTION                            it does not return while the line is there
 *
 * A figure that is left out is "not supported" (3). Cards are numbered as they stand. It counts calls, for
 * `fake_calls`, and refuses all but nvmlInit while no session is open, like the real one.
 */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, BAD_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7,
       DRIVER_NOT_LOADED = 9, TIMEOUT = 10, UNKNOWN = 999 };
enum { NUM_GPUS = 128, NUM_LINES = 128, LINE = 512, NUM_NAMES = 64 };
enum { XID = 0x8, DOUBLE_BIT = 0x2 };
#define NO_INSTANCE 0xFFFFFFFFu

typedef struct { char uuid[96]; int is_watched; } gpu_t;
typedef gpu_t *handle_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned gpu, memory; } use_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { handle_t device; unsigned long long type, data; unsigned gi, ci; } event_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char lines[NUM_LINES][LINE];
static int num_lines, num_sessions, num_delivered, num_hanging;
static gpu_t gpus[NUM_GPUS];
static struct { char name[64]; int count; } calls[NUM_NAMES];

/* The script. */

static int read_script(void) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    num_lines = 0;
    if (!file) return 0;
    while (num_lines < NUM_LINES && fgets(lines[num_lines], LINE, file)) {
        lines[num_lines][strcspn(lines[num_lines], "#\n")] = 0;
        num_lines++;
    }
    fclose(file);
    return 1;
}

static int is_a(const char *line, const char *kind) {
    size_t length = strlen(kind);
    return !strncmp(line, kind, length) && line[length] == ' ';
}

/* The value of ` key=` in a line; 0 if it is not there. */
static int text(const char *line, const char *key, char *value, size_t size) {
    char pattern[32];
    snprintf(pattern, sizeof pattern, " %s=", key);
    const char *found = line ? strstr(line, pattern) : NULL;
    if (!found) return 0;
    found += strlen(pattern);
    snprintf(value, size, "%.*s", (int)strcspn(found, " "), found);
    return 1;
}

static int number(const char *line, const char *key, unsigned long long *value) {
    char written[64];
    if (!text(line, key, written, sizeof written)) return 0;
    *value = strtoull(written, NULL, 10);
    return 1;
}

/* The nth line of a kind, of those where `key` is `value` if given. */
static const char *nth(const char *kind, const char *key, const char *value, int n) {
    char written[96];
    for (int i = 0; i < num_lines; i++)
        if (is_a(lines[i], kind) && (!key || (text(lines[i], key, written, sizeof written) && !strcmp(written, value))))
            if (n-- == 0) return lines[i];
    return NULL;
}

static const char *line_of(handle_t handle) {
    const char *card = nth("card", "uuid", handle->uuid, 0);
    return card ? card : nth("instance", "uuid", handle->uuid, 0);
}

static int error_of(const char *function, handle_t handle) {
    for (int i = 0; i < num_lines; i++) {
        char name[64], uuid[96] = "";
        int code;
        if (sscanf(lines[i], "error %63s %d %95s", name, &code, uuid) >= 2 && !strcmp(name, function)
            && (!uuid[0] || (handle && !strcmp(uuid, handle->uuid)))) return code;
    }
    return OK;
}

static int is_hanging(const char *function) {
    char name[64];
    for (int i = 0; i < num_lines; i++)
        if (sscanf(lines[i], "hang %63s", name) == 1 && !strcmp(name, function)) return 1;
    return 0;
}

/* The same GPU has the same handle, wherever it stands in the script. */
static handle_t handle_of(const char *line) {
    char uuid[96];
    text(line, "uuid", uuid, sizeof uuid);
    for (int i = 0; i < NUM_GPUS; i++) {
        if (!gpus[i].uuid[0]) strcpy(gpus[i].uuid, uuid);
        if (!strcmp(gpus[i].uuid, uuid)) return &gpus[i];
    }
    abort();
}

static void count(const char *function) {
    for (int i = 0; i < NUM_NAMES; i++) {
        if (!calls[i].name[0]) snprintf(calls[i].name, sizeof calls[i].name, "%s", function);
        if (!strcmp(calls[i].name, function) && ++calls[i].count) return;
    }
}

/* What every call begins with; leaves with the lock held. */
static int enter(const char *function, handle_t handle) {
    pthread_mutex_lock(&lock);
    int is_there = read_script();
    while (is_hanging(function)) {
        num_hanging++;
        pthread_mutex_unlock(&lock);
        usleep(1000);
        pthread_mutex_lock(&lock);
        num_hanging--;
        is_there = read_script();
    }
    if (!is_there) return DRIVER_NOT_LOADED;
    int code = error_of(function, handle);
    if (code) return code;
    if (!num_sessions && strcmp(function, "nvmlInitWithFlags")) return UNINITIALIZED;
    return handle && !line_of(handle) ? BAD_ARGUMENT : OK;
}

static int leave(const char *function, int code) {
    if (code == OK) count(function);
    pthread_mutex_unlock(&lock);
    return code;
}

#define ENTER(handle) int code = enter(__func__, handle)
#define LEAVE return leave(__func__, code)

/* One figure of a GPU. */
static int figure(const char *function, handle_t handle, const char *key, unsigned *value) {
    unsigned long long written = 0;
    int code = enter(function, handle);
    if (code == OK && !number(line_of(handle), key, &written)) code = NOT_SUPPORTED;
    if (code == OK) *value = (unsigned)written;
    return leave(function, code);
}

/* For tests. */

int fake_calls(const char *function) {
    for (int i = 0; i < NUM_NAMES; i++)
        if (!strcmp(calls[i].name, function)) return calls[i].count;
    return 0;
}

int fake_sessions(void) { return num_sessions; }

int fake_hanging(void) { return num_hanging; }

void fake_reset(void) {
    pthread_mutex_lock(&lock);
    memset(gpus, 0, sizeof gpus);
    memset(calls, 0, sizeof calls);
    num_sessions = num_delivered = num_hanging = 0;
    pthread_mutex_unlock(&lock);
}

/* The session. */

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    ENTER(NULL);
    if (code == OK) num_sessions++;
    LEAVE;
}

int nvmlShutdown(void) {
    ENTER(NULL);
    /* What is open can be closed, whatever became of the driver. */
    if (num_sessions) num_sessions--, code = OK;
    LEAVE;
}

const char *nvmlErrorString(int code) {
    static char words[32];
    snprintf(words, sizeof words, "code %d", code);
    return words;
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    ENTER(NULL);
    if (code == OK) {
        const char *line = nth("driver", NULL, NULL, 0);
        snprintf(version, size, "%s", line ? line + strlen("driver ") : "570.86");
    }
    LEAVE;
}

/* Cards and instances. */

int nvmlDeviceGetCount_v2(unsigned *num_cards) {
    ENTER(NULL);
    for (*num_cards = 0; code == OK && nth("card", NULL, NULL, (int)*num_cards);) ++*num_cards;
    LEAVE;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, handle_t *handle) {
    ENTER(NULL);
    const char *line = nth("card", NULL, NULL, (int)index);
    if (code == OK && !line) code = BAD_ARGUMENT;
    if (code == OK) {
        *handle = handle_of(line);
        code = error_of(__func__, *handle);
    }
    LEAVE;
}

static int word(const char *function, handle_t handle, const char *key, char *value, unsigned size) {
    int code = enter(function, handle);
    if (code == OK && !text(line_of(handle), key, value, size)) code = NOT_SUPPORTED;
    return leave(function, code);
}

int nvmlDeviceGetUUID(handle_t handle, char *uuid, unsigned size) { return word(__func__, handle, "uuid", uuid, size); }

int nvmlDeviceGetName(handle_t handle, char *name, unsigned size) { return word(__func__, handle, "name", name, size); }

int nvmlDeviceGetPciInfo_v3(handle_t handle, pci_t *pci) {
    memset(pci, 0, sizeof *pci);
    return word(__func__, handle, "bus", pci->bus_id, sizeof pci->bus_id);
}

int nvmlDeviceGetMigMode(handle_t handle, unsigned *current, unsigned *pending) {
    int code = figure(__func__, handle, "split", current);
    *pending = *current;
    return code;
}

int nvmlDeviceGetMaxMigDeviceCount(handle_t handle, unsigned *num_instances) {
    ENTER(handle);
    *num_instances = 7;
    LEAVE;
}

int nvmlDeviceGetMigDeviceHandleByIndex(handle_t card, unsigned index, handle_t *handle) {
    ENTER(card);
    const char *line = code == OK ? nth("instance", "card", card->uuid, (int)index) : NULL;
    if (line) *handle = handle_of(line);
    else if (code == OK) code = NOT_FOUND;
    LEAVE;
}

int nvmlDeviceGetGpuInstanceId(handle_t handle, unsigned *id) { return figure(__func__, handle, "gi", id); }

int nvmlDeviceGetComputeInstanceId(handle_t handle, unsigned *id) { return figure(__func__, handle, "ci", id); }

/* Figures. */

int nvmlDeviceGetMemoryInfo(handle_t handle, memory_t *memory) {
    ENTER(handle);
    const char *line = code == OK ? line_of(handle) : NULL;
    if (line && !number(line, "total", &memory->total)) code = NOT_SUPPORTED;
    if (line && code == OK) {
        number(line, "used", &memory->used);
        number(line, "free", &memory->free);
    }
    LEAVE;
}

int nvmlDeviceGetUtilizationRates(handle_t handle, use_t *use) {
    use->memory = 0;
    return figure(__func__, handle, "use", &use->gpu);
}

int nvmlDeviceGetTemperature(handle_t handle, int sensor, unsigned *degrees) {
    (void)sensor;
    return figure(__func__, handle, "temp", degrees);
}

int nvmlDeviceGetPowerUsage(handle_t handle, unsigned *milliwatts) {
    return figure(__func__, handle, "power", milliwatts);
}

int nvmlDeviceGetComputeRunningProcesses_v3(handle_t handle, unsigned *size, process_t *processes) {
    ENTER(handle);
    unsigned n = 0, room = *size;
    const char *line;
    for (; code == OK && (line = nth("process", "gpu", handle->uuid, (int)n)); n++) {
        unsigned long long pid = 0, used = ~0ull; /* Not available. */
        number(line, "pid", &pid);
        number(line, "used", &used);
        if (processes && n < room) processes[n] = (process_t){(unsigned)pid, used, NO_INSTANCE, NO_INSTANCE};
    }
    if (code == OK && n > (processes ? room : 0)) code = TOO_SMALL;
    *size = n;
    LEAVE;
}

/* Events. */

int nvmlEventSetCreate(int **set) {
    static int the_set;
    ENTER(NULL);
    *set = &the_set;
    LEAVE;
}

int nvmlEventSetFree(int *set) {
    (void)set;
    ENTER(NULL);
    if (num_sessions) code = OK;
    for (int i = 0; i < NUM_GPUS; i++) gpus[i].is_watched = 0;
    LEAVE;
}

int nvmlDeviceGetSupportedEventTypes(handle_t handle, unsigned long long *kinds) {
    ENTER(handle);
    *kinds = XID | DOUBLE_BIT;
    LEAVE;
}

int nvmlDeviceRegisterEvents(handle_t handle, unsigned long long kinds, int *set) {
    (void)kinds, (void)set;
    ENTER(handle);
    if (code == OK) handle->is_watched = 1;
    LEAVE;
}

int nvmlEventSetWait_v2(int *set, event_t *event, unsigned timeout_ms) {
    (void)set, (void)timeout_ms;
    ENTER(NULL);
    const char *line = code == OK ? nth("event", NULL, NULL, num_delivered) : NULL;
    if (code == OK && !line) code = TIMEOUT;
    if (code == OK) {
        char uuid[96] = "";
        unsigned long long xid = 0, gi = NO_INSTANCE;
        text(line, "card", uuid, sizeof uuid);
        number(line, "xid", &xid);
        number(line, "gi", &gi);
        const char *card = nth("card", "uuid", uuid, 0);
        handle_t handle = card ? handle_of(card) : NULL;
        if (handle && handle->is_watched) {
            *event = (event_t){handle, xid ? XID : DOUBLE_BIT, xid, (unsigned)gi, NO_INSTANCE};
            num_delivered++;
        } else code = TIMEOUT;
    }
    LEAVE;
}
