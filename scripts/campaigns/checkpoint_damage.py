"""Random damage to checkpoints: never a wrong value, and the older good one when there is one.

For each trial a directory with one or two checkpoints of a model is copied, its newest is damaged
in one way, and a new job restores. What may come of it:

- `exact`: the newest, bit for bit (the damage changed no value that is restored);
- `older`: exactly the older one, and the newest is told as refused;
- `refused`: a message that names the checkpoint, where there is no older one.

Anything else is a silent wrong restore, or a loss of what was good. `checkpoint verify`, which
reads without JAX, has to agree: what it calls good can be restored.
"""

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrel.checkpoint import Checkpointer, listing, manifest
from jaxrel.checkpoint.readback import bad_leaves
from jaxrel.exit_codes import JaxrelError
from scripts.campaigns.results import write_result

OLD, NEW, MOVED = 10, 20, 30
MESHES = ((4, 2), (2, 2), (1, 1))


# Four models


def _params(key: jax.Array, width: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    a, b = jax.random.split(key)
    w = jax.random.normal(a, (4, width, 32), dtype)
    return {"w": w, "b": jax.random.normal(b, (7,), dtype)}


def adam(step: int) -> Any:
    """A model with AdamW, its counter and a typed key."""
    params = _params(jax.random.key(step), 64)
    state = optax.adamw(1e-3).init(params)
    return {"params": params, "opt": state, "step": jnp.int32(step), "rng": jax.random.key(step)}


def bfloat16(step: int) -> Any:
    """Parameters of two bytes, an average of four, and accumulated gradients."""
    params = _params(jax.random.key(step), 96, jnp.bfloat16)
    state = optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 4).init(params)
    average = jax.tree.map(lambda x: x.astype(jnp.float32) + step, params)
    return {"params": params, "opt": state, "average": average}


def odd(step: int) -> Any:
    """Leaves of every width, an empty one, rbg keys, NaN with a payload."""
    bits = jax.random.bits(jax.random.key(step), (513,), jnp.uint32)
    return {
        "bytes": bits.astype(jnp.uint8),
        "halves": bits.astype(jnp.int16).reshape(27, 19),
        "flags": bits % 2 == 0,
        "nan": jax.lax.bitcast_convert_type(bits | 0x7F800001, jnp.float32),
        "keys": jax.random.split(jax.random.key(step, impl="rbg"), 4),
        "none": jnp.zeros((0, 3)),
    }


def flat(step: int) -> Any:
    """Many small leaves, which Orbax keeps inside its own index."""
    return {f"leaf{i}": jnp.arange(5.0) * i + step for i in range(60)}


MODELS: dict[str, Callable[[int], Any]] = {f.__name__: f for f in (adam, bfloat16, odd, flat)}


def _mesh(data: int, fsdp: int) -> Any:
    return jax.make_mesh((data, fsdp), ("data", "fsdp"), devices=jax.devices()[: data * fsdp])


def _sharding(leaf: Any, mesh: Any) -> NamedSharding:
    split = leaf.ndim == 3 and leaf.shape[1] % 8 == 0
    return NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp")) if split else PartitionSpec())


def _bits(state: Any) -> list[bytes]:
    plain = (
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(state)
    )
    return [jax.device_get(x).tobytes() for x in plain]


@cache
def expected(model: str, step: int) -> list[bytes]:
    """The bytes of each leaf."""
    return _bits(MODELS[model](step))


def save(model: str, directory: Path, *steps: int) -> None:
    """Save that model's states; they are functions of the step."""
    with Checkpointer(directory, keep=9) as checkpointer:  # its marks are files too
        for step in steps:
            state = MODELS[model](step)
            placed = jax.tree.map(lambda x: jax.device_put(x, _sharding(x, _mesh(4, 2))), state)
            checkpointer.save(step, placed)


# Damage


def _bytes(file: Path, change: Callable[[bytearray], object]) -> None:
    content = bytearray(file.read_bytes())
    change(content)
    file.write_bytes(content)


def flip_bit(file: Path, rng: random.Random, _: Path) -> None:
    """One bit."""
    at = rng.randrange(8 * file.stat().st_size)
    _bytes(file, lambda content: content.__setitem__(at // 8, content[at // 8] ^ 1 << at % 8))


def byte_run(file: Path, rng: random.Random, _: Path) -> None:
    """Up to 64 bytes become others."""
    at, count = rng.randrange(file.stat().st_size), rng.randint(1, 64)

    def change(content: bytearray) -> None:
        content[at : at + count] = rng.randbytes(len(content[at : at + count]))

    _bytes(file, change)


def zero_block(file: Path, rng: random.Random, _: Path) -> None:
    """Up to 4 KiB become zero, as of a block that never reached the disk."""
    at = rng.randrange(file.stat().st_size)

    def change(content: bytearray) -> None:
        content[at : at + 4096] = bytes(len(content[at : at + 4096]))

    _bytes(file, change)


def truncate(file: Path, rng: random.Random, _: Path) -> None:
    """The end is gone."""
    _bytes(file, lambda content: content.__delitem__(slice(rng.randrange(len(content)), None)))


def delete(file: Path, rng: random.Random, _: Path) -> None:
    """The file is gone."""
    file.unlink()


def swap(file: Path, rng: random.Random, _: Path) -> None:
    """Two files of the step have each other's content."""
    other = rng.choice(_files(_step(file)))
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)


def stale_manifest(file: Path, rng: random.Random, other: Path) -> None:
    """The manifest of another save of the same step, or of another step."""
    step = rng.choice((NEW, OLD))
    source = other / str(step) / manifest.ITEM / manifest.FILE
    shutil.copy(source, _step(file) / manifest.ITEM / manifest.FILE)


def stale_file(file: Path, rng: random.Random, other: Path) -> None:
    """A file of another save of the same step, in its place."""
    step = _step(file)
    theirs = rng.choice(_files(other / str(NEW)))
    shutil.copy(theirs, step / theirs.relative_to(other / str(NEW)).parent / file.name)
    if file.parent != step / theirs.relative_to(other / str(NEW)).parent:
        shutil.copy(theirs, file)


def rename_step(file: Path, rng: random.Random, _: Path) -> None:
    """The folder bears another step's number."""
    step = _step(file)
    step.rename(step.with_name(str(MOVED)))


DAMAGES = (
    flip_bit, byte_run, zero_block, truncate, delete, swap, stale_manifest, stale_file, rename_step,
)  # fmt: skip


def _files(step: Path) -> list[Path]:
    return sorted(f for f in step.rglob("*") if f.is_file() and f.stat().st_size)


def _step(file: Path) -> Path:
    return next(parent for parent in file.parents if parent.name == str(NEW))


# Trials


@dataclass(frozen=True)
class Outcome:
    """What came of one trial."""

    model: str
    damage: str
    file: str
    older: bool
    """Whether there was an older one to go back to."""
    outcome: str
    ok: bool


def trial(number: int, seed: int, sources: Path, folder: Path) -> Outcome:
    """Damage a copy and restore it; all of it drawn from the seed."""
    rng = random.Random(f"{seed} {number}")
    model = list(MODELS)[number % len(MODELS)]
    damage = DAMAGES[number // len(MODELS) % len(DAMAGES)]
    older = rng.random() < 0.5
    directory = folder / "copy"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(sources / model, directory)
    if not older:
        shutil.rmtree(directory / str(OLD))
    file = rng.choice(_files(directory / str(NEW)))
    kind = str(file.relative_to(directory / str(NEW)).parent)
    damage(file, rng, sources / f"{model}-other")
    outcome, ok = _restore(model, directory, rng.choice(MESHES), older)
    return Outcome(model, damage.__name__, kind, older, outcome, ok)


def _restore(model: str, directory: Path, mesh: tuple[int, int], older: bool) -> tuple[str, bool]:
    """What a new job makes of the directory, and whether that is right."""
    newest = next(e for e in listing.scan(directory) if e.step > OLD)
    sound = newest.good and not bad_leaves(newest.path)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding(x, _mesh(*mesh))),
        jax.eval_shape(lambda: MODELS[model](NEW)),
    )
    checkpointer = Checkpointer(directory)
    try:
        state, found = checkpointer.restore(abstract)
    except JaxrelError as error:
        named = str(newest.step) in str(error)
        return "refused", not older and not sound and named
    told = {step for step, _ in checkpointer.refused()} | {
        e.step for e in listing.scan(directory) if e.status in ("corrupt", "foreign")
    }
    if found["step"] == NEW:
        return "exact", _bits(state) == expected(model, NEW)
    right = _bits(state) == expected(model, OLD) and newest.step in told
    return "older", older and found["step"] == OLD and right and not sound


def carry_out(count: int, seed: int, folder: Path) -> list[Outcome]:
    """All trials, in `folder`."""
    for model in MODELS:
        save(model, folder / model, OLD, NEW)
        other = folder / f"{model}-other"
        save(model, other, OLD)
        with Checkpointer(other, verify_mb_s=0) as checkpointer:
            checkpointer.save(NEW, MODELS[model](NEW + 1))
    return [trial(number, seed, folder, folder) for number in range(count)]


def main() -> int:
    """Run the campaign; exit 0 only if no restore was wrong and nothing good was lost."""
    parser = argparse.ArgumentParser(
        prog="scripts/campaign checkpoint-damage", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = carry_out(args.trials, args.seed, Path(folder))
    wrong = [o for o in outcomes if not o.ok]
    counts = Counter(f"{o.damage}: {o.outcome}" for o in outcomes)
    for name, count in sorted(counts.items()):
        print(f"{count:5}  {name}")
    print(f"{len(outcomes)} damages, {len(wrong)} not as promised")
    for outcome in wrong[:20]:
        print(f"  {outcome}")
    result = {"trials": len(outcomes), "wrong": wrong, "counts": counts}
    print(f"written: {write_result('checkpoint-damage', args.seed, plain(result))}")
    return 1 if wrong else 0


def plain(result: dict[str, Any]) -> dict[str, Any]:
    """With the outcomes that were wrong as text."""
    return result | {"wrong": [str(o) for o in result["wrong"]], "counts": dict(result["counts"])}


if __name__ == "__main__":
    sys.exit(main())
