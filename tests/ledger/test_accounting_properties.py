"""What holds of the accounting whatever is in the ledger."""

from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrel.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    Evaluated,
    Event,
    FailureDetected,
    Finished,
    GangDead,
    JobEnded,
    JobStarted,
    PhaseBegan,
    Record,
    RecordsLost,
    Resumed,
    StepCompleted,
    Unknown,
    WorkerFailed,
    WorkerStarted,
)
from jaxrel.ledger.accounting import Accounting, account
from tests.ledger.records import SECOND

pytestmark = pytest.mark.core
many = settings(max_examples=150, deadline=None, derandomize=True)

absurd = st.sampled_from([float("nan"), float("inf"), -float("inf"), -1.0, 1e300, 1e-9])
durations = st.one_of(st.just(0.0), st.floats(0, 20), absurd)
step_numbers = st.one_of(st.integers(0, 8), st.sampled_from([-1, 2**62]))
phases: Any = st.sampled_from(
    [*["train"] * 6, "start", "join", "restore", "compile", "evaluation", "checkpoint", "stop", "?"]
)
failures = st.builds(
    FailureDetected, st.just("exit"), st.none(), st.none(), st.just(""), st.none() | durations
)
steps = st.builds(
    StepCompleted,
    step_numbers,
    data_s=durations,
    checkpoint_s=durations,
    evaluation_s=durations,
    checks_s=durations,
)
leader_events = st.one_of(
    failures,
    st.just(GangDead()),
    st.just(AttemptStarted([], "")),
    st.builds(AttemptEnded, st.sampled_from([0, 70])),
    st.just(JobStarted([], [], 1)),
    st.just(JobEnded(0)),
)
worker_events = st.one_of(
    steps,
    steps,
    steps,
    st.builds(PhaseBegan, phases),
    st.builds(Resumed, step_numbers, st.just(8), st.just(2)),
    st.just(WorkerStarted(0, 2, 1, "h")),
    st.builds(Evaluated, step_numbers, st.none(), st.just(1), durations),
    st.builds(CheckpointSaved, step_numbers, durations, durations, st.just("")),
    st.builds(Finished, step_numbers, st.just("")),
    st.just(WorkerFailed("E: x", 70)),
    st.just(RecordsLost("ledger", 3, "full")),
    st.just(Unknown("Gardened")),
)
gaps = st.one_of(st.integers(0, 10 * SECOND), st.just(0), st.just(3600 * SECOND))


def healthy(seed: int) -> list[Record]:
    """A run as it should be, of one to four attempts, most of them supervised."""
    random = Random(seed)
    records, time, step, attempt = [], random.randrange(2**50), 0, 0

    def add(source: str, event: Event) -> None:
        nonlocal time
        time += random.randrange(5 * SECOND)
        records.append(Record(time, attempt, source, event))

    for attempt in range(1, random.randint(2, 5)):  # noqa: B007  `add` uses it
        led = random.random() < 0.8
        if led:
            add("leader", AttemptStarted(["h"], "h:1"))
        add("rank0", WorkerStarted(0, 1, 1, "h"))
        add("rank0", PhaseBegan("restore"))
        step = random.randint(max(0, step - 3), step)
        add("rank0", Resumed(step, 8, 1))
        add("rank0", PhaseBegan("compile"))
        add("rank0", PhaseBegan("train"))
        for _ in range(random.randrange(6)):
            step += 1
            add("rank0", StepCompleted(step, data_s=random.random()))
        if random.random() < 0.3:
            add("rank0", PhaseBegan("stop"))
            add("rank0", Finished(step, ""))
        elif led:
            add("leader", FailureDetected("exit", 0, "h", "", 3 * random.random()))
            add("leader", GangDead())
    return records


seeds = st.integers(0, 10_000)


@st.composite
def ledgers(draw: st.DrawFn, *, forwards: bool = True) -> list[Record]:
    """A run to which anything has happened: events lost, duplicated, made up, in other
    attempts, out of order; its clock may step back."""
    records = healthy(draw(seeds))
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, len(records) - 1)) if records else 0
        match draw(st.sampled_from(["lose", "again", "swap", "attempt", "late", "new", "new"])):
            case "lose":
                del records[place : place + draw(st.integers(1, 3))]
            case "again":
                records[place:place] = records[max(0, place - draw(st.integers(0, 4))) : place]
            case "swap" if records:
                records.insert(draw(st.integers(0, len(records) - 1)), records.pop(place))
            case "attempt":
                change = draw(st.sampled_from([-1, 1]))
                for i in range(place, min(len(records), place + draw(st.integers(1, 9)))):
                    records[i] = replace(records[i], attempt=max(0, records[i].attempt + change))
            case "late":
                gap = draw(gaps) if forwards else -draw(gaps)
                for i in range(place, len(records)):
                    records[i] = replace(records[i], time_us=records[i].time_us + gap)
            case "new" if records:
                source = draw(st.sampled_from(["leader", "rank0", "rank1"]))
                event = draw(leader_events if source == "leader" else worker_events)
                records.insert(place, replace(records[place], source=source, event=event))
    if forwards:
        times = accumulate((record.time_us for record in records), max)
        records = [replace(r, time_us=t) for r, t in zip(records, times, strict=True)]
    return records


def check(accounting: Accounting, records: list[Record]) -> None:
    parts = [accounting.effective_us, *accounting.badput_us.values()]
    assert sum(parts) == accounting.wall_us
    assert min(parts) >= 0
    assert accounting.effective_us <= accounting.wall_us
    place = accounting.start_us
    for span in accounting.spans:  # they tile the wall time
        assert span.start_us == place < span.end_us
        place = span.end_us
    assert place == accounting.start_us + accounting.wall_us
    times = [record.time_us for record in records if record.source in ("leader", "rank0")]
    assert accounting.wall_us == (max(times) - times[0] if times else 0)


@many
@given(ledgers(forwards=False))
def test_every_microsecond_is_in_one_category(records: list[Record]) -> None:
    check(account(records), records)


@many
@given(ledgers(), st.integers(0, 100 * SECOND))
def test_looking_later_adds_time_that_is_not_effective(records: list[Record], more: int) -> None:
    plain = account(records)
    later = account(records, plain.start_us + plain.wall_us + more)
    begun = any(record.source in ("leader", "rank0") for record in records)
    assert later.wall_us == plain.wall_us + (more if begun else 0)
    assert later.effective_us == plain.effective_us
    assert later.effective_us + sum(later.badput_us.values()) == later.wall_us


@many
@given(ledgers(), st.data())
def test_other_ranks_move_no_time(records: list[Record], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(records)))
    time = data.draw(st.integers(0, 2**51))
    stranger = Record(time, data.draw(st.integers(0, 9)), "rank3", data.draw(worker_events))
    assert account([*records[:place], stranger, *records[place:]]) == account(records)


@settings(many, max_examples=250)
@given(ledgers(), st.data())
def test_one_more_failure_never_raises_effective_time(
    records: list[Record], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(records)))
    before = records[place - 1] if place else Record(0, 1, "leader", GangDead())
    # Not even one whose clock is wrong, or that claims another attempt or writer.
    time = before.time_us + data.draw(st.one_of(gaps, st.integers(-(2**40), 2**40)))
    attempt = max(0, before.attempt + data.draw(st.sampled_from([0, 0, 0, 1, -1, 3])))
    source = data.draw(st.sampled_from(["leader", "leader", "leader", "rank0", "rank1"]))
    failure = Record(time, attempt, source, data.draw(failures))
    with_failure = account([*records[:place], failure, *records[place:]])
    assert with_failure.effective_us <= account(records).effective_us


def recovery(time: int, attempt: int, step: int, phase: Any) -> list[Record]:
    """A failure of `attempt` and all that follows until the next one is in `phase`."""
    events = [
        (0, "leader", FailureDetected("exit", 1, "h", "", 0.5)),
        (0, "leader", GangDead()),
        (1, "leader", AttemptStarted(["h"], "h:1")),
        (1, "rank0", WorkerStarted(0, 1, 1, "h")),
        (1, "rank0", Resumed(step, 8, 1)),
        (1, "rank0", PhaseBegan(phase)),
    ]
    return [Record(time, attempt + later, source, event) for later, source, event in events]


@settings(many, max_examples=150)
@given(ledgers(), st.data())
def test_nor_does_a_failure_with_its_recovery(records: list[Record], data: st.DataObject) -> None:
    """The attempt that fails is the current one; what it still writes is too late."""
    place = data.draw(st.integers(0, len(records)))
    head, tail = records[:place], records[place:]
    own = [record.attempt for record in head if record.source != "rank1"]
    highest = max(own, default=1)
    later = [replace(r, attempt=r.attempt + 1) if r.attempt > highest else r for r in tail]
    time = head[-1].time_us if head else 0
    inserted = recovery(time, highest, data.draw(st.integers(0, 8)), "train")
    result = account([*head, *inserted, *later])
    assert result.effective_us <= account(records).effective_us


@many
@given(seeds, st.data())
def test_nor_does_one_after_which_the_run_goes_on(seed: int, data: st.DataObject) -> None:
    """The next attempt goes on with what the old one did, from its last step or an earlier."""
    records = healthy(seed)
    place = data.draw(st.integers(1, len(records)))
    head, tail = records[:place], records[place:]
    attempt, own = head[-1].attempt, [r.event for r in head if r.attempt == head[-1].attempt]
    done = [event.step for event in own if isinstance(event, StepCompleted | Resumed)]
    phase = [event.phase for event in own if isinstance(event, PhaseBegan)]
    from_step = data.draw(st.integers(0, done[-1] if done else 0))
    inserted = recovery(head[-1].time_us, attempt, from_step, phase[-1] if phase else "start")
    later = [replace(r, attempt=r.attempt + 1) for r in tail]
    assert account([*head, *inserted, *later]).effective_us <= account(records).effective_us


@settings(many, max_examples=150)
@given(ledgers(), st.data())
def test_time_that_ends_in_a_resumption_is_never_training(
    records: list[Record], data: st.DataObject
) -> None:
    """However long it is, and whether or not the ledger knows the step."""
    place = data.draw(st.integers(1, len(records))) if records else 0
    head, tail = records[:place], records[place:]
    own = [record.attempt for record in head if record.source != "rank1"]
    attempt = max(own, default=1) + data.draw(st.integers(0, 2))
    resumption = Resumed(data.draw(st.sampled_from([3, 1000])), 8, 2)
    time = head[-1].time_us if head else 0

    def after(gap: int) -> int:
        shifted = [replace(r, time_us=r.time_us + gap) for r in tail]
        return account(
            [*head, Record(time + gap, attempt, "rank0", resumption), *shifted]
        ).effective_us

    assert after(10_000 * SECOND) == after(0)


@many
@given(ledgers(), st.data())
def test_a_duplicated_or_missing_event_breaks_nothing(
    records: list[Record], data: st.DataObject
) -> None:
    if records:
        place = data.draw(st.integers(0, len(records) - 1))
        for changed in (
            [*records[:place], records[place], *records[place:]],
            [*records[:place], *records[place + 1 :]],
        ):
            check(account(changed), changed)


def test_the_hostile_ledgers_are_worth_their_name() -> None:
    """The properties above would hold of ledgers without a single effective second, too."""
    effective = []

    @settings(many, max_examples=300)
    @given(ledgers())
    def look(records: list[Record]) -> None:
        effective.append(account(records).effective_us > 0)

    look()
    assert sum(effective) > len(effective) / 2
