"""The core: rings, backlog, token ledger and the scheduler's round.

Native over structs, without a clock and without a lock. _core.pxd says what crosses
between threads and who owns it; each part says what it decides:

    rings      how messages and text cross
    backlog    who waits and who is next
    ledger     what is promised and what was given
    backfill   who may pass one that does not fit, and what is held for it
    lanes      how shares and the border follow the backlogs
    limits     who may pass now, and how long the others wait
    lengths    how long answers come out
    growth     promises that grow, and who gives way when they do not fit
    placement  on which device slot a request starts
    failover   what goes on elsewhere when a device slot dies, and how that is found
    round      one pass of the scheduler over all of it
    door       who comes in, who waits for a place and who is sent away
    faces      each of them alone, for Python
    state      how all of it begins and ends
    outcome    what comes out of an attempt
    scheduler  the event loop's side; the only part that touches Python objects per request
    drive      native threads' work for stress tests and measuring
    model_slots  workers without a model: what they take, a cost model says
    simulation   a trace through a scheduler with such workers, under a virtual clock
"""

cimport cython
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport INT64_MAX
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memmove, memset
from posix.time cimport timespec
from posix.unistd cimport close, read

include "core/rings.pxi"
include "core/backlog.pxi"
include "core/ledger.pxi"
include "core/queues.pxi"
include "core/backfill.pxi"
include "core/lanes.pxi"
include "core/limits.pxi"
include "core/lengths.pxi"
include "core/growth.pxi"
include "core/placement.pxi"
include "core/failover.pxi"
include "core/round.pxi"
include "core/door.pxi"
include "core/door_face.pxi"
include "core/faces.pxi"
include "core/state.pxi"
include "core/outcome.pxi"
include "core/scheduler.pxi"
include "core/seats.pxi"
include "core/drive.pxi"
include "core/model_slots.pxi"
include "core/simulation.pxi"
