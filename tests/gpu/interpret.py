"""What the kernels of `tests.gpu.kernels` compute, by Triton's interpreter on tensors of the host:
`TRITON_INTERPRET=1 python -m tests.gpu.interpret FOLDER` runs each kernel on each of its sets of tensors in
FOLDER/before.pt, by name, and writes them to FOLDER/after.pt.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from torch import Tensor

from tests.gpu.h100 import load


def main(folder: Path) -> None:
    kernels = {kernel["name"]: kernel for kernel in json.loads((folder / "kernels.json").read_text())}
    sets: dict[str, list[dict[str, Tensor]]] = torch.load(folder / "before.pt")
    for name, tensors in sets.items():
        for by_name in tensors:
            _run(folder / f"{kernels[name]['sources'][0]}.py", kernels[name], by_name)
    torch.save(sets, folder / "after.pt")


def _run(path: Path, kernel: dict, tensors: dict[str, Tensor]) -> None:
    plain = path.with_name(f"{path.stem}_plain.py")
    # Without Inductor's launcher, which wants a device.
    code = re.sub(r"@triton_heuristics.*?\n\)\n(?=@triton)", "", path.read_text(), flags=re.DOTALL)
    plain.write_text(code.replace("triton_helpers.set_driver_to_gpu()", ""))
    given = [tensors[one[0]].view(-1)[one[1] :] if isinstance(one, list) else one for one in kernel["arguments"]]
    names = re.findall(r"(\w+)(?: : tl.constexpr)?[,)]", re.findall(r"\ndef \w+(\(.*\)):", code)[0])
    block = kernel["machine"][0]["block"]
    programs = -(-given[names.index("xnumel")] // block)
    getattr(load(plain), path.stem)[(programs,)](*given, XBLOCK=block)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
