"""Who uses which model, over loads that the test ends when it likes."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lqs.admission.fleet import Fleet
from lqs.config import Config, LogConfig
from lqs.engine.residents import Resident, Residents
from lqs.errors import DeviceError, RequestRefused
from lqs.observe.log import Log
from lqs.request import NS_PER_S

S = NS_PER_S


class Shelf:
    """Models a and b on demand with room for one of them, z for good. Loads hang until `end_load`."""

    def __init__(self) -> None:
        self.served = {
            name: SimpleNamespace(
                name=name, index=index, is_on_demand=name != "z", is_absent=name != "z", state="x", progress=0.0,
                devices=[], load_time_left_s=lambda now_ns: 3.0, path=Path("/nowhere"),
            )
            for index, name in enumerate("abz")
        }  # fmt: skip
        self.deeds: list[str] = []
        self.is_empty_now = True
        self.is_disk_hung = False
        self.num_looks = 0
        self.broken: dict[str, Exception] = {}  # What a thread raises, by the beginning of its name.
        models = SimpleNamespace(
            names=lambda: list("abz"), all=lambda: list(self.served.values()), find=self.served.get,
            replan=lambda served, plan: None, load_one=lambda served, tell: None,
            close_to_newcomers=lambda served: self.deeds.append(f"close {served.name}"),
            is_empty=lambda served: self.is_empty_now, leave=lambda served, limit_s: True,
            plan_of=lambda served: SimpleNamespace(takes={"m": 1}),
        )  # fmt: skip
        known = {name: Resident({"m": 1}, is_pinned=False) for name in "ab"} | {"z": Resident({}, is_pinned=True)}
        self.residents = Residents(known, {"m": 1}, 10 * S)
        self.now_ns = 1
        self.loads: list[asyncio.Future[None]] = []
        self.log = io.StringIO()
        self.fleet = Fleet(
            Config(), models, self.residents, in_thread=self._in_thread, plan=lambda served: None,  # type: ignore[arg-type,return-value]
            log=Log(LogConfig(), self.log), now_ns=lambda: self.now_ns,
        )  # fmt: skip
        self.residents.loaded("z", self.now_ns)

    async def _in_thread(self, function: Callable[[], Any], name: str) -> Any:
        for beginning in [each for each in self.broken if name.startswith(each)]:
            raise self.broken.pop(beginning)
        if name.startswith("lqs-plan"):
            return None
        if name.startswith("lqs-look"):
            self.num_looks += 1
            if self.is_disk_hung:
                await asyncio.get_running_loop().create_future()
            return function()
        self.deeds.append(name)
        if name.startswith("lqs-unload"):
            return True
        self.loads.append(asyncio.get_running_loop().create_future())
        return await self.loads[-1]

    def wants(self, name: str) -> asyncio.Task[None]:
        return asyncio.create_task(self.fleet.have(self.served[name]))  # type: ignore[arg-type]

    def users(self, name: str) -> tuple[int, int]:
        figures = self.fleet.figures(self.served[name])  # type: ignore[arg-type]
        return figures.num_users, figures.num_waiting

    async def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * S)
        self.fleet.tend()
        await turns()

    async def end_load(self, error: Exception | None = None) -> None:
        load = self.loads.pop(0)
        if error is None:
            load.set_result(None)
        else:
            load.set_exception(error)
        await turns()


async def turns() -> None:
    """Let everything go on that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def use(shelf: Shelf, name: str) -> None:
    """Bring a model, and hold it."""
    user = shelf.wants(name)
    await turns()
    await shelf.end_load()
    await user


def played(scene: Callable[[Shelf], Any]) -> None:
    async def play() -> None:
        shelf = Shelf()
        await scene(shelf)
        await shelf.fleet.close()

    asyncio.run(play())


def test_all_that_wait_for_a_model_use_it_before_it_could_leave_again() -> None:
    async def scene(shelf: Shelf) -> None:
        first = [shelf.wants("a") for _ in range(3)]
        await turns()
        other = shelf.wants("b")
        await turns()
        await shelf.end_load()
        assert all(task.done() for task in first)
        assert (shelf.users("a"), shelf.users("b")) == ((3, 0), (0, 1))
        for _ in first:
            shelf.fleet.release(0)
        await turns()
        await shelf.end_load()
        assert other.done()
        assert shelf.deeds == ["lqs-load-a", "close a", "lqs-unload-a", "lqs-load-b"]

    played(scene)


def test_who_leaves_while_it_waits_holds_nothing_and_wants_nothing() -> None:
    async def scene(shelf: Shelf) -> None:
        using = shelf.wants("a")
        await turns()
        await shelf.end_load()
        waiting = shelf.wants("b")
        await turns()
        waiting.cancel()
        await turns()
        shelf.fleet.release(0)
        await turns()
        assert using.done()
        assert shelf.deeds == ["lqs-load-a"]
        assert shelf.users("b") == (0, 0)

    played(scene)


def test_one_that_is_cancelled_just_as_it_is_let_in_gives_back_what_it_was_given() -> None:
    async def scene(shelf: Shelf) -> None:
        waiting = shelf.wants("a")
        await turns()
        shelf.loads.pop().set_result(None)
        # Until the waiter's future is set, but not yet its task.
        while shelf.users("a")[0] == 0:  # noqa: ASYNC110 The loop itself is what is waited for.
            await asyncio.sleep(0)
        waiting.cancel()
        await turns()
        assert waiting.cancelled()
        assert shelf.users("a") == (0, 0)

    played(scene)


def test_one_that_does_not_come_by_itself_is_not_said_to_be_loading_when_its_load_has_failed() -> None:
    async def scene(shelf: Shelf) -> None:
        shelf.fleet.unload(shelf.served["z"])  # type: ignore[arg-type]
        await turns()
        shelf.fleet.load(shelf.served["z"])  # type: ignore[arg-type]
        await turns()
        await shelf.end_load(DeviceError("no room"))
        for wait_s in (5.0, 30.0):
            with pytest.raises(RequestRefused, match="could not be loaded") as caught:
                await shelf.wants("z")
            assert (caught.value.reason, caught.value.retry_after_s) == ("no_device", wait_s)
            shelf.now_ns += 5 * S
        figures = shelf.fleet.figures(shelf.served["z"])  # type: ignore[arg-type]
        assert (figures.num_loads, figures.num_failed_loads) == (1, 1)

    played(scene)


def test_nothing_is_begun_once_the_server_ends_and_a_load_that_is_under_way_is_waited_for() -> None:
    async def scene(shelf: Shelf) -> None:
        first, second = shelf.wants("a"), shelf.wants("b")
        await turns()
        closing = asyncio.create_task(shelf.fleet.close())
        await turns()
        assert not closing.done()
        await shelf.end_load()
        await closing
        assert shelf.fleet.hung == []
        assert shelf.deeds == ["lqs-load-a"]
        for task in (first, second):
            task.cancel()

    played(scene)


def test_a_load_that_fails_is_told_to_all_and_tried_again_after_a_while() -> None:
    async def scene(shelf: Shelf) -> None:
        waiting = [shelf.wants("a") for _ in range(2)]
        await turns()
        await shelf.end_load(DeviceError("no room"))
        for task in waiting:
            with pytest.raises(RequestRefused) as caught:
                task.result()
            assert (caught.value.reason, caught.value.retry_after_s) == ("no_device", 5.0)
        with pytest.raises(RequestRefused):
            await shelf.wants("a")
        assert shelf.fleet.figures(shelf.served["a"]).failure == "no room"  # type: ignore[arg-type]
        shelf.now_ns += 5 * S
        again = shelf.wants("a")
        await turns()
        await shelf.end_load()
        assert again.done()
        assert shelf.deeds.count("lqs-load-a") == 2

    played(scene)


@pytest.mark.parametrize("where", ["lqs-plan", "lqs-load", "lqs-unload"])
def test_what_nobody_foresaw_in_a_load_or_unload_is_told_and_the_next_model_comes(where: str) -> None:
    async def scene(shelf: Shelf) -> None:
        shelf.broken = {where: MemoryError("secret")}
        if where == "lqs-unload":
            await use(shelf, "a")
            shelf.fleet.release(0)
        else:
            first = shelf.wants("a")
            await turns()
            with pytest.raises(RequestRefused, match="could not be loaded"):
                first.result()
            assert "MemoryError in _in_thread, test_fleet.py" in str(shelf.fleet.figures(shelf.served["a"]).failure)  # type: ignore[arg-type]
        second = shelf.wants("b")
        await turns()
        await shelf.end_load()
        assert second.result() is None
        assert shelf.fleet.figures(shelf.served["a"]).standing == "absent"  # type: ignore[arg-type]
        assert "MemoryError in _in_thread, test_fleet.py" in shelf.log.getvalue()
        assert "secret" not in shelf.log.getvalue()

    played(scene)


def test_a_load_whose_remains_cannot_be_given_back_is_told_all_the_same() -> None:
    async def scene(shelf: Shelf) -> None:
        shelf.broken = {"lqs-load": DeviceError("no room"), "lqs-unload": OSError()}
        first = shelf.wants("a")
        await turns()
        with pytest.raises(RequestRefused, match="could not be loaded"):
            first.result()
        assert shelf.fleet.figures(shelf.served["a"]).failure == "no room"  # type: ignore[arg-type]
        assert 'failed to unload, please report it model=a reason="OSError in' in shelf.log.getvalue()

    played(scene)


@pytest.mark.parametrize("change", ["written", "replaced", "grown", "removed"])
def test_a_load_that_failed_is_tried_again_soon_when_its_file_has_changed(tmp_path: Path, change: str) -> None:
    """B55: failures are remembered with a growing wait, which only time, an admin or another file ends."""
    path = tmp_path / "a.gguf"
    path.write_bytes(b"broken")

    def change_it() -> None:
        if change == "removed":
            path.unlink()
        elif change == "grown":
            os.truncate(path, 100)
        elif change == "replaced":
            fresh = path.with_suffix(".new")
            fresh.write_bytes(b"BROKEN")
            fresh.replace(path)
        else:
            path.write_bytes(b"BROKEN")
            # A later moment, however coarse the clock of the file system is.
            os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))

    async def scene(shelf: Shelf) -> None:
        shelf.served["a"].path = path
        first = shelf.wants("a")
        await turns()
        await shelf.end_load(DeviceError("broken"))
        assert first.exception() is not None
        for _ in range(3):
            with pytest.raises(RequestRefused):
                await shelf.wants("a")
        await shelf.pass_s(1)
        change_it()
        for _ in range(2):
            with pytest.raises(RequestRefused):
                await shelf.wants("a")
            await shelf.pass_s(1)
        again = shelf.wants("a")
        await turns()
        await shelf.end_load(DeviceError("broken too"))
        # It was the same model once more, so the wait goes on growing.
        with pytest.raises(RequestRefused) as caught:
            again.result()
        assert caught.value.retry_after_s == 10.0
        for _ in range(3):
            with pytest.raises(RequestRefused):
                await shelf.wants("a")
            await shelf.pass_s(1)
        assert shelf.deeds.count("lqs-load-a") == 2
        assert shelf.log.getvalue().count("model file has changed") == 1

    played(scene)


def test_what_is_written_while_it_is_loaded_is_news_when_that_has_failed(tmp_path: Path) -> None:
    """B55: a file that is still being copied is tried again when there is more of it."""
    path = tmp_path / "a.gguf"
    path.write_bytes(b"half")

    async def scene(shelf: Shelf) -> None:
        shelf.served["a"].path = path
        first = shelf.wants("a")
        await turns()
        path.write_bytes(b"the whole")
        await shelf.end_load(DeviceError("cut short"))
        assert first.exception() is not None
        await shelf.pass_s(1)
        again = shelf.wants("a")
        await turns()
        await shelf.end_load()
        assert again.result() is None
        assert shelf.users("a") == (1, 0)

    played(scene)


def test_a_file_that_is_still_being_copied_is_not_loaded_until_it_stands_still(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"1")

    async def scene(shelf: Shelf) -> None:
        shelf.served["a"].path = path
        first = shelf.wants("a")
        await turns()
        await shelf.end_load(DeviceError("cut short"))
        assert first.exception() is not None
        for _ in range(3):
            with path.open("ab") as file:
                file.write(b"more")
            await shelf.pass_s(1)
            for _ in range(2):
                with pytest.raises(RequestRefused):
                    await shelf.wants("a")
        assert shelf.loads == []
        await shelf.pass_s(1)
        again = shelf.wants("a")
        await turns()
        await shelf.end_load()
        assert again.result() is None

    played(scene)


def test_a_file_is_looked_at_once_a_second_however_many_ask_and_a_disk_that_hangs_stops_nobody() -> None:
    async def scene(shelf: Shelf) -> None:
        first = shelf.wants("a")
        await turns()
        await shelf.end_load(DeviceError("no room"))
        assert first.exception() is not None
        shelf.num_looks = 0
        shelf.is_disk_hung = True
        await shelf.pass_s(1)
        for _ in range(50):
            with pytest.raises(RequestRefused, match="could not be loaded"):
                await shelf.wants("a")
            await shelf.pass_s(0.01)
        await shelf.pass_s(2)
        # The one that hangs; there is no second beside it.
        assert shelf.num_looks == 1

    played(scene)


def test_a_load_that_fails_is_no_unload() -> None:
    async def scene(shelf: Shelf) -> None:
        first = shelf.wants("a")
        await turns()
        await shelf.end_load(DeviceError("no room"))
        assert first.exception() is not None
        figures = shelf.fleet.figures(shelf.served["a"])  # type: ignore[arg-type]
        assert (figures.num_failed_loads, figures.num_unloads) == (1, 0)
        await shelf.pass_s(5)
        second = shelf.wants("a")
        await turns()
        await shelf.end_load()
        await second
        shelf.fleet.release(0)
        shelf.fleet.unload(shelf.served["a"])  # type: ignore[arg-type]
        await turns()
        figures = shelf.fleet.figures(shelf.served["a"])  # type: ignore[arg-type]
        assert (figures.num_loads, figures.num_unloads) == (2, 1)

    played(scene)


def test_a_model_that_an_admin_unloads_is_refused_until_it_is_loaded() -> None:
    async def scene(shelf: Shelf) -> None:
        await shelf.wants("z")
        shelf.fleet.unload(shelf.served["z"])  # type: ignore[arg-type]
        await turns()
        assert shelf.deeds == []
        with pytest.raises(RequestRefused, match="not loaded"):
            await shelf.wants("z")
        shelf.fleet.release(2)
        await turns()
        assert shelf.deeds == ["close z", "lqs-unload-z"]
        shelf.fleet.load(shelf.served["z"])  # type: ignore[arg-type]
        await turns()
        await shelf.end_load()
        await shelf.wants("z")

    played(scene)


def test_all_who_wait_while_a_model_loads_only_to_leave_get_it_when_it_comes_again() -> None:
    async def scene(shelf: Shelf) -> None:
        first = shelf.wants("a")
        await turns()
        shelf.fleet.unload(shelf.served["a"])  # type: ignore[arg-type]
        second = shelf.wants("a")
        await shelf.end_load()
        assert not first.done()
        assert not second.done()
        await shelf.end_load()
        assert (first.result(), second.result()) == (None, None)
        assert shelf.deeds == ["lqs-load-a", "close a", "lqs-unload-a", "lqs-load-a"]

    played(scene)


def test_a_load_that_fails_after_an_unload_is_not_begun_again_with_nobody_waiting() -> None:
    async def scene(shelf: Shelf) -> None:
        first = shelf.wants("a")
        await turns()
        shelf.fleet.unload(shelf.served["a"])  # type: ignore[arg-type]
        second = shelf.wants("a")
        await turns()
        await shelf.end_load(DeviceError("no room"))
        for task in (first, second):
            with pytest.raises(RequestRefused, match="could not be loaded"):
                task.result()
        assert shelf.deeds.count("lqs-load-a") == 1

    played(scene)


def test_a_model_that_an_admin_loads_comes_though_a_client_that_waited_for_it_leaves() -> None:
    async def scene(shelf: Shelf) -> None:
        await use(shelf, "a")
        for change in (shelf.fleet.unload, shelf.fleet.load):
            change(shelf.served["a"])  # type: ignore[arg-type]
        client = shelf.wants("a")
        await turns()
        client.cancel()
        await turns()
        shelf.fleet.release(0)
        await turns()
        await shelf.end_load()
        assert shelf.fleet.figures(shelf.served["a"]).standing == "ready"  # type: ignore[arg-type]

    played(scene)


def test_a_load_takes_back_an_unload_of_a_model_that_is_coming() -> None:
    async def scene(shelf: Shelf) -> None:
        for change in (shelf.fleet.unload, shelf.fleet.load):
            change(shelf.served["z"])  # type: ignore[arg-type]
            await turns()
        shelf.fleet.unload(shelf.served["z"])  # type: ignore[arg-type]
        with pytest.raises(RequestRefused, match="not loaded"):
            await shelf.wants("z")
        shelf.fleet.load(shelf.served["z"])  # type: ignore[arg-type]
        await shelf.end_load()
        await shelf.end_load()
        await shelf.wants("z")
        assert shelf.deeds.count("lqs-load-z") == 2

    played(scene)


def test_who_gives_up_in_the_same_turn_as_all_are_told_is_only_cancelled() -> None:
    async def scene(shelf: Shelf) -> None:
        waiting = [shelf.wants("a") for _ in range(3)]
        await turns()
        for task in waiting[:2]:
            task.cancel()
        shelf.fleet._fail(shelf.served["a"], "no room")  # type: ignore[arg-type]
        await turns()
        assert [task.cancelled() for task in waiting] == [True, True, False]
        assert isinstance(waiting[2].exception(), RequestRefused)
        assert shelf.users("a") == (0, 0)
        await shelf.end_load()

    played(scene)


def test_a_model_is_used_from_its_first_device_slot_on_and_an_unload_waits_for_the_rest_of_its_load() -> None:
    async def scene(shelf: Shelf) -> None:
        waiting = shelf.wants("a")
        await turns()
        shelf.fleet.came(shelf.served["a"])  # type: ignore[arg-type]
        await turns()
        assert waiting.done()
        assert shelf.users("a") == (1, 0)
        await shelf.wants("a")
        for _ in range(2):
            shelf.fleet.release(0)
        shelf.fleet.unload(shelf.served["a"])  # type: ignore[arg-type]
        await turns()
        assert shelf.deeds == ["lqs-load-a"]
        await shelf.end_load()
        assert shelf.deeds == ["lqs-load-a", "close a", "lqs-unload-a"]

    played(scene)


def test_nothing_is_closed_that_still_runs_something() -> None:
    async def scene(shelf: Shelf) -> None:
        await_a = shelf.wants("a")
        await turns()
        await shelf.end_load()
        await await_a
        shelf.is_empty_now = False
        shelf.fleet.release(0)
        shelf.fleet.unload(shelf.served["a"])  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        assert shelf.deeds[-1] == "close a"
        shelf.is_empty_now = True
        await asyncio.sleep(0.05)
        assert shelf.deeds[-1] == "lqs-unload-a"

    played(scene)
