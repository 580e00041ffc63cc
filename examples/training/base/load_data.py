"""Write images of ten shapes to the claim, in the files of MNIST, unless they are there.

To train with MNIST itself, put its two unpacked files there instead. Standard library only.
"""

from __future__ import annotations

import argparse
import random
import struct
from pathlib import Path

SIDE = 28
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
_MAGIC_IMAGES, _MAGIC_LABELS = 2051, 2049
_NOISE = 96


def shape(label: int) -> bytes:
    """The image of a label: a frame and a bar whose size and place depend on it."""
    low, high = 3 + label, SIDE - 3 - label // 2
    rows = [bytearray(SIDE) for _ in range(SIDE)]
    for at in range(SIDE):
        rows[low][at] = rows[at][high] = 255
        rows[at][(label * 5) % SIDE] = 192
        rows[at][at] = 255 if label % 2 else 0
    return b"".join(rows)


def write(folder: Path, count: int, seed: int) -> bool:
    """Write both files; returns whether they were missing. The labels come last: they mean that all is there."""
    if (folder / IMAGES).exists() and (folder / LABELS).exists():
        return False
    folder.mkdir(parents=True, exist_ok=True)
    source = random.Random(seed)  # noqa: S311 - noise, no secret
    shapes = [shape(label) for label in range(10)]
    labels = bytes(source.randrange(10) for _ in range(count))
    quieter = bytes(value * _NOISE // 255 for value in range(256))
    images = (bytes(map(max, shapes[label], source.randbytes(SIDE * SIDE).translate(quieter))) for label in labels)
    for name, head, parts in (
        (IMAGES, struct.pack(">IIII", _MAGIC_IMAGES, count, SIDE, SIDE), images),
        (LABELS, struct.pack(">II", _MAGIC_LABELS, count), [labels]),
    ):
        partial = folder / f"{name}.partial"
        with partial.open("wb") as file:
            file.write(head)
            file.writelines(parts)
        partial.replace(folder / name)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder for the images")
    parser.add_argument("--count", type=int, default=4096, help="the number of images")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    written = write(options.data, options.count, options.seed)
    print(f"{options.count} images written" if written else "the images are there already", flush=True)


if __name__ == "__main__":
    main()
