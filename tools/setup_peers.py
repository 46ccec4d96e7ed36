# SPDX-License-Identifier: Apache-2.0
"""Get others' CuTe DSL kernels into a folder of their own; quick when there is nothing left to do.

    python3 tools/setup_peers.py

The emulator's tests run these kernels unmodified. They stay out of the environment: vLLM chooses its attention by what
it can import, and flash_attn must not be among that. Only the tests' subprocesses put the folder on their path.

CUTLASS's examples are no package: they come as single files of a commit. Where they cannot be had, the rest is there
all the same, and the tests of them are skipped.

Works with the standard library of Python 3.8 or newer. Environment variables:

    VENV      the environment whose pip installs them, and whose Python they are for (default .venv)
    PEERS     the folder (default .peers)
    CUTLASS   a clone of NVIDIA/cutlass that has the commit, to take the examples from (default: GitHub)
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# flash-attn-4 says it is for every later CuTe DSL, but its later betas need one that 4.6.0 is not.
PINS = ("flash-attn-4==4.0.0b20", "quack-kernels==0.6.3", "einops==0.8.2", "torch-c-dlpack-ext==0.1.5")
STAMP = ".set-up"
# v4.6.0 of NVIDIA/cutlass, whose examples are for the CuTe DSL that is installed, and the digest of those below.
CUTLASS_COMMIT = "e6233cbac5d7c7a865c19c91cd684ceece19513c"
CUTLASS_DIGEST = "f6706c0730b1f64f3873d0083758ad26939e2e5c1da4cb4f91aa33d0a90bbbe8"
CUTLASS_FOLDER = "examples/python/CuTeDSL"
EXAMPLES = (
    *(f"cute/blackwell/tutorial/tutorial_gemm/fp16_gemm_{step}.py" for step in ("0", "1", "2", "3", "3_1", "4", "5")),
    *(f"cute/blackwell/tutorial/tutorial_gemm/{name}.py" for name in ("nvfp4_gemm_0", "nvfp4_gemm_1", "utils")),
    *(f"cute/blackwell/tutorial/tutorial_tma/tma_v{step}.py" for step in range(3)),
    *(
        f"cute/blackwell/kernel/dense_gemm/dense_gemm{kind}.py"
        for kind in (
            "",
            "_alpha_beta_persistent",
            "_persistent",
            "_persistent_dynamic",
            "_persistent_prefetch",
            "_software_pipeline",
        )
    ),
    *(
        f"cute/blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent{kind}.py"
        for kind in ("", "_amax", "_prefetch")
    ),
    *(
        f"cute/blackwell/kernel/blockwise_gemm/{name}.py"
        for name in ("blockwise_gemm", "contiguous_grouped_gemm", "masked_grouped_gemm")
    ),
    "cute/blackwell/kernel/reduce/reduce.py",
    "cute/blackwell/kernel/rmsnorm/rmsnorm.py",
    "cute/blackwell/kernel/attention/fmha/fmha.py",
    *(f"cute/blackwell/kernel/attention/mla/mla_{part}.py" for part in ("decode_fp16", "decode_fp8", "helpers")),
    *(
        f"cute/blackwell/kernel/attention/mamba2_ssd/mamba2_ssd{part}.py"
        for part in ("", "_reference", "_tile_scheduler")
    ),
    "cute/blackwell/kernel/grouped_gemm/grouped_gemm.py",
    *(f"cute/blackwell/kernel/mixed_input_gemm/mixed_input_{part}.py" for part in ("gemm", "host_utils")),
    *(f"cute/hopper/kernel/dense_gemm/dense_gemm{kind}.py" for kind in ("", "_persistent", "_fp8_2xacc")),
    "cute/hopper/kernel/cta_norm/cta_norm.py",
    "cute/hopper/kernel/grouped_gemm/grouped_gemm.py",
    "cute/hopper/kernel/attention/fmha.py",
    "helpers/__init__.py",
    "helpers/fmha_helpers.py",
)
TIMEOUT_S = 30


def folder() -> Path:
    return ROOT / os.environ.get("PEERS", ".peers")


def wanted() -> str:
    """What a complete folder's stamp says."""
    return "\n".join(PINS) + "\n"


def is_current(peers: Path) -> bool:
    stamp = peers / STAMP
    return stamp.is_file() and stamp.read_text() == wanted()


def install(python: Path, peers: Path) -> None:
    """Fill the folder anew; SystemExit with pip's status where it fails, and then the folder is not there."""
    # pip leaves what it finds in a target folder as it is, also the files of another version.
    shutil.rmtree(peers, ignore_errors=True)
    command = [python, "-m", "pip", "install", "--quiet", "--quiet", "--no-deps", "--target", peers, *PINS]
    words = [str(word) for word in command]
    print(f"peers: {' '.join(words)}", flush=True)
    status = subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL).returncode
    if status:
        shutil.rmtree(peers, ignore_errors=True)
        sys.exit(f"peers: failed with status {status}")
    (peers / STAMP).write_text(wanted())


def example(path: str) -> bytes:
    """A file of CUTLASS's examples; OSError where it cannot be had."""
    place = f"{CUTLASS_FOLDER}/{path}"
    clone = os.environ.get("CUTLASS")
    if clone:
        words = ["git", "-C", clone, "show", f"{CUTLASS_COMMIT}:{place}"]
        found = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        if found.returncode:
            raise OSError(f"{clone} does not have {CUTLASS_COMMIT}:{place}")
        return found.stdout
    url = f"https://raw.githubusercontent.com/NVIDIA/cutlass/{CUTLASS_COMMIT}/{place}"
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        text: bytes = answer.read()
    return text


def digest(texts: dict[str, bytes]) -> str:
    """Of files by their paths."""
    every = hashlib.sha256()
    for path, text in texts.items():
        every.update(f"{path} {len(text)}\n".encode() + text)
    return every.hexdigest()


def get_examples(examples: Path) -> None:
    """Fill the folder anew; where that fails it is not there."""
    shutil.rmtree(examples, ignore_errors=True)
    print(f"peers: {len(EXAMPLES)} files of CUTLASS's examples", flush=True)
    try:
        texts = {path: example(path) for path in EXAMPLES}
        if digest(texts) != CUTLASS_DIGEST:
            raise OSError(f"the examples of {CUTLASS_COMMIT} are not those that were tested")
    except OSError as error:
        print(f"peers: no examples of CUTLASS, and no tests of them: {error}", flush=True)
        return
    for path, text in texts.items():
        (examples / path).parent.mkdir(parents=True, exist_ok=True)
        (examples / path).write_bytes(text)
    (examples / STAMP).write_text(CUTLASS_DIGEST)


def main() -> None:
    peers = folder()
    if not is_current(peers):
        install(ROOT / os.environ.get("VENV", ".venv") / "bin" / "python", peers)
    examples = peers / "cutlass_examples"
    stamp = examples / STAMP
    if not stamp.is_file() or stamp.read_text() != CUTLASS_DIGEST:
        get_examples(examples)


if __name__ == "__main__":
    main()
