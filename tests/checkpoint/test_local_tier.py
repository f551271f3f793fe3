"""The local tier: newer than the durable one, whole without one host, never wrong."""

import logging
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrel.checkpoint import Checkpointer, listing, local, local_files
from jaxrel.checkpoint.local_listing import local_rows, local_verified
from jaxrel.checkpoint.verify import verify
from jaxrel.digest import state_digest, tree_words
from jaxrel.exit_codes import DataRefusedError, UsageError
from tests.checkpoint import states
from tests.checkpoint.test_processes import finish, free_port, start
from tests.checkpoint.worker import WIDTH


def tiers(root: Path, **options: Any) -> Checkpointer:
    return Checkpointer(root / "durable", local_dir=root / "local", **options)


def save_local(checkpointer: Checkpointer, *steps: int) -> None:
    mesh = states.mesh(4, 2)
    for step in steps:
        state = states.make(step, mesh)
        assert checkpointer.save_local(step, state, extra={"at": step})
        jax.jit(lambda x: x, donate_argnums=0)(state)  # what was copied is not overwritten
        assert checkpointer.local is not None
        checkpointer.local.wait()


def restored(checkpointer: Checkpointer, data: int = 2, fsdp: int = 2) -> dict[str, Any]:
    """The manifest of what is restored, which has the bits of its step."""
    on = states.mesh(data, fsdp)
    state, found = checkpointer.restore(states.abstract(on))
    assert states.bits(state) == states.bits(states.make(found["step"], on))
    return found


def files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "local").iterdir())


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Durable steps 10 and 20, local ones 22 and 24; the job is gone."""
    checkpointer = tiers(tmp_path)
    for step in (10, 20):
        checkpointer.save(step, states.make(step, states.mesh(4, 2)))
    checkpointer.wait()
    save_local(checkpointer, 22, 24)
    checkpointer._leave()
    return tmp_path


@pytest.mark.core
@pytest.mark.parametrize(("data", "fsdp"), [(4, 2), (2, 4), (1, 1), (8, 1)])
def test_the_newest_of_both_tiers_is_restored_on_any_mesh(two: Path, data: int, fsdp: int) -> None:
    checkpointer = tiers(two)
    assert checkpointer.latest() == 24
    assert checkpointer.manifest(24)["extra"] == {"at": 24}
    assert restored(checkpointer, data, fsdp)["step"] == 24
    checkpointer.save(25, states.make(25, states.mesh(4, 2)))  # on the same timeline
    checkpointer.close()
    assert tiers(two).latest() == 25
    assert restored(tiers(two))["step"] == 25


def test_a_local_step_can_be_asked_for_and_made_durable(two: Path) -> None:
    checkpointer = tiers(two)
    on = states.mesh(2, 2)
    state, found = checkpointer.restore(states.abstract(on), step=22)
    assert found["step"] == 22 and not checkpointer.is_durable(22) and checkpointer.is_durable(20)
    checkpointer.save(22, state)
    checkpointer.close()
    assert restored(Checkpointer(two / "durable"))["step"] == 22


@pytest.mark.parametrize("step", [-1, 2.5])
def test_a_step_that_is_none_is_refused(two: Path, step: Any) -> None:
    with pytest.raises(UsageError, match="expected a whole number from 0"):
        tiers(two).save_local(step, states.make(1, states.mesh(4, 2)))


def test_the_name_of_a_run_is_that_of_one_directory_alone(tmp_path: Path) -> None:
    """Neither a copy of it nor nonsense in the file leads to the files of another."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    name = local_files.run_name(run)
    assert local_files.run_name(run) != name, "not written down yet"
    local_files.keep_name(run, name)
    assert local_files.run_name(run) == name
    shutil.copytree(run, copy)
    assert local_files.run_name(copy) != name
    for nonsense in (b"../../etc 1\n", b"\xff\xfe", b""):
        (run / local_files.NAME_FILE).write_bytes(nonsense)
        assert len(local_files.run_name(run)) == 16


def test_folders_of_simulated_hosts_are_all_found(tmp_path: Path) -> None:
    for host in ("host0", "host1"):
        (tmp_path / f"ram-{host}" / "a" / "name").mkdir(parents=True)
    found = local_files.run_folders(f"{tmp_path}/ram-{{host}}/a", "name")
    assert [folder.parent.parent.name for folder in found] == ["ram-host0", "ram-host1"]
    assert local_files.run_folders(f"{tmp_path}/ram-host0/a", "other") == []


def test_without_a_local_tier_the_durable_one_counts_alone(two: Path) -> None:
    assert restored(Checkpointer(two / "durable"))["step"] == 20
    shutil.rmtree(two / "local")
    assert restored(tiers(two))["step"] == 20
    with pytest.raises(UsageError, match="no local_dir"):
        Checkpointer(two / "durable").save_local(30, {"x": jnp.ones(3)})


def test_the_local_tier_counts_where_the_durable_one_is_gone(two: Path) -> None:
    shutil.rmtree(two / "durable")
    checkpointer = tiers(two)
    assert checkpointer.latest() == 24
    assert restored(checkpointer)["step"] == 24


@pytest.mark.parametrize("share", [i / 12 for i in range(12)])
def test_a_flipped_bit_is_never_restored(two: Path, share: float) -> None:
    """Anywhere in the file: the older local one is taken, and the damage is told if it was seen."""
    file = two / "local" / "24.0.npz"
    flip(file, int(share * file.stat().st_size))
    checkpointer = tiers(two)
    found = restored(checkpointer)
    if found["step"] == 24:  # between the members, where nothing of the state is
        return
    assert found["step"] == 22
    assert [step for step, _ in checkpointer.refused()] in ([], [24])
    assert "24.0.npz" not in files(two), "it is not looked at again"


def test_no_damage_to_a_files_own_structure_stops_a_start(two: Path) -> None:
    """Headers of the zip, of its members and of their arrays: whatever reading them raises."""
    rng, whole = random.Random(0), (two / "local" / "24.0.npz").read_bytes()
    ends = whole.rfind(b"PK\x05\x06")
    (found,) = (f for f in local_files.scan(two / "local") if f.step == 24)
    headers = [i for i in range(len(whole) - 4) if whole[i : i + 4] == b"PK\x03\x04"]
    for _ in range(150):
        content = bytearray(whole)
        near = rng.choice([*headers, ends - rng.randrange(4000)])
        content[max(0, min(len(content) - 1, near + rng.randrange(160)))] ^= 1 << rng.randrange(8)
        (two / "local" / "24.0.npz").write_bytes(content)
        files = local_files.scan(two / "local")
        for number in range(len(found.pieces)):
            held = [f for f in files if f.save == found.save]
            with local_files.Blocks(held) as blocks, local_files.Blocks([found]) as now:
                size = 3  # no piece has it: a length that is wrong is refused
                assert blocks.read(number, size) is None and now.read(number, size) is None
        rows = local_verified([two / "local"])
        assert [row["step"] for row in rows] in ([22], [22, 24])
    (two / "local" / "24.0.npz").write_bytes(content)
    assert restored(tiers(two))["step"] in (22, 24)


def test_a_damaged_piece_is_told_and_refused(two: Path) -> None:
    for step in (22, 24):
        file = two / "local" / f"{step}.0.npz"
        flip(file, file.stat().st_size // 2)
    checkpointer = tiers(two)
    assert restored(checkpointer)["step"] == 20
    assert [step for step, _ in checkpointer.refused()] == [24, 22]
    assert files(two) == []


def test_a_wrong_value_under_a_right_checksum_is_refused(two: Path) -> None:
    """What the zip format would let through: the digests are compared on the devices."""
    (found,) = [f for f in local_files.scan(two / "local") if f.step == 24]
    number = next(n for n, piece in enumerate(found.pieces) if piece.path == "params/bias")
    with np.load(found.file) as members:
        held = {n: members[str(n)].copy() for n in found.held}
    held[number][0] ^= 1
    local_files.write(found.file, found.manifest, found.pieces, held)
    checkpointer = tiers(two)
    assert restored(checkpointer)["step"] == 22
    ((step, why),) = checkpointer.refused()
    assert step == 24 and "digests differ in params/bias" in why


@pytest.mark.parametrize("cut", [0, 100, 0.5, 0.99])
def test_a_truncated_file_is_no_checkpoint(two: Path, cut: float) -> None:
    file = two / "local" / "24.0.npz"
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(int(cut * size) if cut < 1 else int(cut))
    assert tiers(two).latest() == 22
    assert restored(tiers(two))["step"] == 22


def test_two_are_kept_and_steps_of_a_timeline_that_was_left_are_gone(two: Path) -> None:
    assert files(two) == ["22.0.npz", "24.0.npz"]
    (two / "local" / "26.0.npz.part").write_bytes(b"of a save that was killed")
    checkpointer = tiers(two)
    checkpointer.restore(states.abstract(states.mesh(4, 2)), step=20)  # as a roll-back
    assert files(two) == []
    save_local(checkpointer, 22, 24, 26)
    assert files(two) == ["24.0.npz", "26.0.npz"]
    checkpointer.save(27, states.make(27, states.mesh(4, 2)))
    checkpointer.close()
    assert files(two) == [], "a finished run leaves nothing in memory"


def test_a_process_whose_saves_fail_does_not_fill_the_disks_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = tiers(tmp_path)
    monkeypatch.setattr(local, "from_everyone", lambda mine: [mine, [False, -1]])
    save_local(checkpointer, *range(1, 9))
    assert files(tmp_path) == ["6.0.npz", "7.0.npz", "8.0.npz"]


def test_another_state_in_the_directory_is_refused_by_its_leaves(two: Path) -> None:
    with pytest.raises(DataRefusedError, match="local checkpoint of step 24 in .* does not fit"):
        tiers(two).restore({"x": jnp.ones(3)})


def test_a_failing_disk_costs_only_the_local_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "local").write_text("a file")
    checkpointer = tiers(tmp_path)
    with caplog.at_level(logging.WARNING):
        save_local(checkpointer, 1)
        checkpointer.save(2, states.make(2, states.mesh(4, 2)))
        checkpointer.close()
    assert "the local save of step 1 failed" in caplog.text
    assert restored(Checkpointer(tmp_path / "durable"))["step"] == 2


def test_a_save_is_left_out_while_the_one_before_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), local_files.write

    def slow(*args: Any) -> None:
        gate.wait(60)
        write(*args)

    monkeypatch.setattr(local_files, "write", slow)
    checkpointer, state = tiers(tmp_path), states.make(1, states.mesh(4, 2))
    assert checkpointer.save_local(1, state)
    assert not checkpointer.save_local(2, states.make(2, states.mesh(4, 2)))
    assert tiers(tmp_path).latest() is None, "what is not complete is not there"
    gate.set()
    assert checkpointer.local is not None
    checkpointer.local.wait()
    assert tiers(tmp_path).latest() == 1


def test_list_and_verify_show_what_this_host_has(two: Path) -> None:
    listed = listing.list_checkpoints(two / "durable", [two / "local"])
    rows = {row["step"]: row for row in listed["checkpoints"]}
    assert listed["latest_restorable"] == 24
    assert [rows[s]["tier"] for s in (10, 20, 22, 24)] == ["durable"] * 2 + ["local"] * 2
    assert rows[24]["status"] == "committed" and not rows[24]["trusted"]
    assert rows[24]["bytes"] == (two / "local" / "24.0.npz").stat().st_size
    state = states.make(24, states.mesh(2, 2))
    assert rows[24]["state_digest"] == state_digest(state, jax.jit(tree_words)(state))
    found = verify(two / "durable", None, [two / "local"])
    assert found["ok"] and [row["step"] for row in found["checkpoints"]] == [10, 20, 22, 24]
    file = two / "local" / "22.0.npz"
    flip(file, file.stat().st_size // 2)
    found = verify(two / "durable", 22, [two / "local"])
    assert not found["ok"] and len(found["checkpoints"][0]["bad_leaves"]) == 1


def test_part_of_a_step_is_incomplete(killed: Path) -> None:
    (file,) = (f for f in local_files.scan(killed / "disk0") if f.step == 6)
    folder = killed / "part"
    folder.mkdir()
    local_files.write(folder / "6.0.npz", file.manifest, file.pieces, {})
    (row,) = local_rows([folder])
    assert (row["step"], row["status"]) == (6, "incomplete")
    assert verify(killed / "durable", None, [folder])["checkpoints"][-1]["step"] == 2


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hosts with a disk each saved 2 durably, 4 and 6 locally, and were killed."""
    root = tmp_path_factory.mktemp("hosts")
    port = free_port()
    processes = [start("tiers", index, port, root, "save") for index in range(2)]
    for process in processes:
        assert process.stdout is not None
        line = process.stdout.readline()
        while line and not line.startswith("{"):
            line = process.stdout.readline()
        assert '"saved": 6' in line
    for process in processes:
        process.kill()
        process.communicate()
    return root


def again(root: Path) -> list[dict[str, Any]]:
    port = free_port()
    processes = [start("tiers", index, port, root, "restore") for index in range(2)]
    try:
        ended = [finish(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, ended, strict=True):
        assert process.returncode == 0, err
    return [said[0] for said, _ in ended]


def wipe(root: Path) -> None:
    shutil.rmtree(root / "disk0")


def damage(root: Path) -> None:
    file = root / "disk1" / "6.1.npz"
    flip(file, file.stat().st_size // 2)


def lose_both_of_6(root: Path) -> None:
    (root / "disk0" / "6.0.npz").unlink()
    damage(root)


def lose_all(root: Path) -> None:
    for disk in ("disk0", "disk1"):
        shutil.rmtree(root / disk)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lose", "step", "refused"),
    [(None, 6, []), (wipe, 6, []), (damage, 6, []), (lose_both_of_6, 4, [6]), (lose_all, 2, [])],
)
def test_a_lost_hosts_shards_come_from_its_peer(
    killed: Path, tmp_path: Path, lose: Any, step: int, refused: list[int]
) -> None:
    root = tmp_path / "hosts"
    shutil.copytree(killed, root)
    if lose is not None:
        lose(root)
    for said in again(root):
        assert said["equal"]
        assert said["step"] == step
        assert said["refused"] == refused
        if step == 6:
            assert (said["latest"], said["extra"]) == (6, {"of": "0"})


@pytest.mark.slow
@pytest.mark.parametrize("disk", [0, 1])
def test_one_host_that_is_left_has_all_of_it(killed: Path, tmp_path: Path, disk: int) -> None:
    """Eight devices in one process, where eight in two had saved."""
    shutil.copytree(killed, tmp_path / "hosts")
    checkpointer = Checkpointer(
        tmp_path / "hosts" / "durable", local_dir=tmp_path / "hosts" / f"disk{disk}"
    )
    on = states.mesh(2, 2)
    state, found = checkpointer.restore(states.abstract(on, WIDTH))
    assert found["step"] == 6
    assert states.bits(state) == states.bits(states.make(6, on, WIDTH))
