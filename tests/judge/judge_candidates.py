# SPDX-License-Identifier: Apache-2.0
"""Candidates for the judge: what honest ones do, and what cheating ones try."""

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A file.

    Attributes:
        run: what is done for a layer's tensors `t`; for softmax also `x`, `out` and `softmax(x)` in float32.
        prepare: what is done before.
        head: at the file's top.
        said: for a cheating one, what the verdict says of it.
        options: of the judge.
        gpu: whether it runs on a GPU alone.
        cpu: whether it runs on a CPU alone.
        quick: whether it takes less than a minute on the emulator.
    """

    run: str
    prepare: str = ""
    head: str = ""
    op: str = "softmax"
    said: str = ""
    decorator: str = ""
    arch: str | None = None
    options: tuple[tuple[str, float], ...] = ()
    gpu: bool = False
    cpu: bool = False
    quick: bool = False

    def source(self) -> str:
        names = "        x, out = t.x, t.out\n" if self.op == "softmax" else ""
        return (
            f"import torch\nfrom dsl_backend.providers import Launch, provider\n{textwrap.dedent(self.head)}\n"
            f'@provider("{self.op}", name="candidate"{self.decorator})\n'
            "def prepare(problem, inputs):\n"
            "    def softmax(x):\n"
            "        return (torch.log_softmax if problem.log else torch.softmax)(x.float(), -1)\n"
            f"{textwrap.indent(textwrap.dedent(self.prepare), '    ')}\n"
            "    def run(layer):\n"
            "        t = inputs.layers[layer]\n"
            f"{names}{textwrap.indent(textwrap.dedent(self.run), '        ')}\n"
            "    return run\n"
        )


RIGHT = "out.copy_(softmax(x))\nreturn out"

# Writes to memory that no tensor of the candidate has.
CLEAR = """
import ctypes

def clear(address, count, where):
    if where == "cpu":
        ctypes.memset(address, 0, count)
        return
    from cuda.bindings import driver
    (status,) = driver.cuMemsetD8(address, 0, count)
    assert not int(status), status
"""

ROWS_KERNEL = """
import cutlass
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

class Rows:
    def __init__(self, log):
        self.log = log

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor):
        self.kernel(x, out).launch(grid=(cute.ceil_div(cute.size(x, mode=[0]), 32), 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        row = cute.arch.block_idx()[0] * 32 + cute.arch.thread_idx()[0]
        if row < cute.size(x, mode=[0]):
            row_max = cutlass.Float32(-cutlass.Float32.inf)
            for j in cutlass.range(cute.size(x, mode=[1])):
                row_max = cute.arch.fmax(row_max, cutlass.Float32(x[row, j]))
            row_sum = cutlass.Float32(0.0)
            for j in cutlass.range(cute.size(x, mode=[1])):
                row_sum += cute.math.exp(cutlass.Float32(x[row, j]) - row_max)
            for j in cutlass.range(cute.size(x, mode=[1])):
                below = cutlass.Float32(x[row, j]) - row_max
                if cutlass.const_expr(self.log):
                    out[row, j] = out.element_type(below - cute.math.log(row_sum))
                else:
                    out[row, j] = out.element_type(cute.math.exp(below) / row_sum)

def view(tensor):
    return from_dlpack(tensor).mark_layout_dynamic(leading_dim=1)
"""
ROWS = "compiled = cute.compile(Rows(problem.log), view(inputs.layers[0].x), view(inputs.layers[0].out))"
# Each thread writes a column's exponential to shared memory and reads its neighbour's, without a barrier in between:
# 64 threads are two warps.
RACE_KERNEL = (
    ROWS_KERNEL.replace("block=(32, 1, 1)", "block=(64, 1, 1)")
    .replace(
        "        row = cute.arch.block_idx()[0] * 32 + cute.arch.thread_idx()[0]\n",
        "        lane = cute.arch.thread_idx()[0]\n"
        "        row = cute.arch.block_idx()[0] * 32 + lane\n"
        "        posted = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(64))\n"
        "        posted[lane] = cutlass.Float32(0.0)\n"
        "        nothing = posted[63 - lane]\n",
    )
    .replace("row_sum = cutlass.Float32(0.0)", "row_sum = nothing")
    .replace("if row < ", "if lane < 32 and row < ")
)

GATHER = """
def gathered(problem, inputs, rows, request):
    count = problem.kv_lens[request]
    pages = inputs.batch.block_table[request, : -(-count // problem.page_size)].long()
    return rows[pages].flatten(0, 1)[:count].float()

def attend(problem, inputs, t, causal=True, window=True, identity=False):
    first = 0
    for request, (queries, keys) in enumerate(zip(problem.q_lens, problem.kv_lens)):
        k, v = gathered(problem, inputs, t.keys, request), gathered(problem, inputs, t.values, request)
        if identity:
            k = t.keys.flatten(0, 1)[:keys].float()
        group = problem.heads_q // problem.heads_kv
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        q = t.q[first : first + queries].float()
        scores = torch.einsum("qhd,khd->hqk", q, k) * problem.scale
        place = torch.arange(keys, device=q.device)
        distance = place[keys - queries :, None] - place[None]
        if causal:
            scores = scores.masked_fill(distance < 0, -torch.inf)
        if window and problem.window_left is not None:
            scores = scores.masked_fill(distance > problem.window_left, -torch.inf)
        t.out[first : first + queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(t.out.dtype)
        first += queries
    return t.out
"""
LINEAR = "y = t.x.float() @ t.weight.float().T\n"
SWIGLU = """
y = t.x.float() @ t.weight.float().T
if problem.gated:
    gate, up = y.chunk(2, -1)
    y = torch.nn.functional.silu(gate) * up
t.out.copy_(y)
return t.out
"""
FILTERS = """
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

def chances(t):
    p = t.parameters
    logits = t.logits.clone()
    if p.min_p is not None:
        chance = logits.softmax(-1)
        logits[chance < chance.amax(-1, keepdim=True) * p.min_p[:, None]] = -torch.inf
    if p.top_k is not None or p.top_p is not None:
        logits = apply_top_k_top_p_pytorch(logits, p.top_k, p.top_p)
    return logits.softmax(-1)
"""

NORM = """
z = t.x if t.residual is None else t.x + t.residual
y = torch.nn.functional.rms_norm(z.float(), z.shape[-1:], t.weight.float(), 1e-5)
"""
# The sum and the scales are outputs too.
NORM_REST = """
if t.residual is not None:
    t.residual_out.copy_(z)
if t.scale_out is not None:
    t.scale_out.copy_((y.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512)))
scale = t.scale if t.scale_out is None else t.scale_out
"""
NORM_OUT = "t.out.copy_(y if scale is None else (y / scale).clamp(-448, 448))\nreturn t.out"
# Under the capture of a CUDA graph the host cannot read which experts there are.
EXPERTS = """
ids = t.topk_ids.long()
up_rows, down_rows = t.w13[ids].float(), t.w2[ids].float()
gate, up = torch.einsum("mkwh,mh->mkw", up_rows, t.x.float()).chunk(2, -1)
made = torch.einsum("mkhw,mkw->mkh", down_rows, torch.nn.functional.silu(gate) * up)
weights = t.topk_weights[..., None]
total = (weights * made).sum(1)
t.out.copy_(total)
return t.out
"""

# `child()` is true in a process of a session of its own, which its parent leaves to the system.
DETACHED = """
import os, time

def child():
    if os.fork():
        os.wait()
        return False
    os.setsid()
    if os.fork():
        os._exit(0)
    return True
"""
PACKAGE_LINEAR = """
from dataclasses import replace
from dsl_backend.gemm.args import GemmOperands
from dsl_backend.linear import plan
from dsl_backend.linear.eager import arranged
from dsl_backend.runtime.target import from_arch

TARGET = replace(from_arch("sm_90a"), sm_count=4)

def plan_of(spec):
    return plan.plan_of(spec, TARGET, torch.device("cpu"), 0, "cute")
"""
PACKAGE_DECODE = """
from dataclasses import replace
from dsl_backend.attention import api
from dsl_backend.runtime.target import from_arch

TARGET = replace(from_arch("sm_90a"), sm_count=4)

def plan_of(spec, batch):
    return api.Planner(spec, TARGET, api.Workspace(torch.device("cpu")), "cute").plan(batch)
"""

HONEST: dict[str, Candidate] = {
    "eager": Candidate(RIGHT),
    "out-argument": Candidate(
        "if x.dtype != out.dtype:\n    return out.copy_(softmax(x))\n"
        "return (torch.log_softmax if problem.log else torch.softmax)(x, -1, out=out)"
    ),
    "by-hand": Candidate("""
        wide = x.float()
        below = wide - wide.amax(-1, keepdim=True)
        total = below.exp().sum(-1, keepdim=True)
        out.copy_(below - total.log() if problem.log else below.exp() / total)
        return out
    """),
    "online": Candidate("""
        top = torch.full_like(x[:, :1], -torch.inf, dtype=torch.float32)
        total = torch.zeros_like(top)
        for part in x.float().split(100, -1):
            new = torch.maximum(top, part.amax(-1, keepdim=True))
            safe = torch.where(new == -torch.inf, 0.0, new)
            total = total * (top - safe).exp() + (part - safe).exp().sum(-1, keepdim=True)
            top = new
        result = x.float() - top
        out.copy_(result - total.log() if problem.log else result.exp() / total)
        return out
    """),
    "float64": Candidate(
        "out.copy_((torch.log_softmax if problem.log else torch.softmax)(x.double(), -1))\nreturn out"
    ),
    "row-by-row": Candidate("for row in range(len(x)):\n    out[row] = softmax(x[row]).to(out.dtype)\nreturn out"),
    "returns-nothing": Candidate("out.copy_(softmax(x))"),
    "launch-with-a-view": Candidate(
        "out.copy_(softmax(x))\nreturn out.t()",
        head="def wrapped(run):\n    return Launch(run, lambda result: result.t())\n",
    ),
    "workspace": Candidate(
        "work.copy_(x)\nwork.copy_(softmax(work))\nout.copy_(work)\nreturn out",
        prepare="work = torch.empty_like(inputs.layers[0].x, dtype=torch.float32)",
    ),
    "writes-twice": Candidate("out.zero_()\nout.copy_(softmax(x))\nreturn out"),
    "threads-that-end": Candidate(
        """
        def part(rows):
            out[rows] = softmax(x[rows]).to(out.dtype)
        half = len(x) // 2
        workers = [threading.Thread(target=part, args=(rows,)) for rows in (slice(0, half), slice(half, None))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return out
        """,
        head="import threading",
        # A thread has a current stream of its own, of which a graph has nothing.
        cpu=True,
    ),
    "keeps-helpers": Candidate(
        RIGHT,
        head="""
        import multiprocessing, subprocess, sys
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()
        helpers = ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
        assert helpers.submit(abs, -1).result() == 1
        # A compiler's server waits in a session of its own.
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        """,
        cpu=True,
    ),
    "another-stream-that-is-waited-for": Candidate(
        "aside.wait_stream(torch.cuda.current_stream())\n"
        "with torch.cuda.stream(aside):\n    out.copy_(softmax(x))\n"
        "torch.cuda.current_stream().wait_stream(aside)\nreturn out",
        prepare="aside = torch.cuda.Stream()",
        gpu=True,
    ),
    "chatty": Candidate(
        "print('x' * 5000)\nprint('{\"ticket\": 1}', file=sys.stderr)\n" + RIGHT, head="import sys\nprint('loaded')"
    ),
    "times-itself": Candidate(
        "start = time.perf_counter()\nout.copy_(softmax(x))\nspent.append(time.perf_counter() - start)\nreturn out",
        prepare="spent = []",
        head="import time",
    ),
    "bf16-only": Candidate(
        RIGHT, decorator=", objections=lambda p: [] if p.dtype == p.out_dtype == torch.bfloat16 else ['is for bf16']"
    ),
    "writes-a-file": Candidate(
        "open(os.path.join(os.environ['HOME'], 'log'), 'a').write('x')\n" + RIGHT, head="import os"
    ),
    "caches-a-plan": Candidate(
        "key = (x.shape, x.stride())\nplans[key] = plans.get(key, 0) + 1\n" + RIGHT, prepare="plans = {}"
    ),
    "triton": Candidate(
        cpu=True,
        run="kernel[(len(x),)](x, out, x.stride(0), out.stride(0), x.shape[1], problem.log, "
        "triton.next_power_of_2(x.shape[1]))\nreturn out",
        head="""
        import os
        os.environ["TRITON_INTERPRET"] = "1"
        import triton
        from triton import language as tl

        @triton.jit
        def kernel(x, out, x_stride, out_stride, width, LOG: tl.constexpr, BLOCK: tl.constexpr):
            row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
            v = tl.load(x + row * x_stride + columns, columns < width, other=-float("inf")).to(tl.float32)
            v = v - tl.max(v, 0)
            total = tl.sum(tl.exp(v), 0)
            result = v - tl.log(total) if LOG else tl.exp(v) / total
            tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), columns < width)
        """,
    ),
    "cute-sm90": Candidate("compiled(view(x), view(out))\nreturn out", ROWS, ROWS_KERNEL, arch="sm_90a"),
    "cute-sm100": Candidate("compiled(view(x), view(out))\nreturn out", ROWS, ROWS_KERNEL, arch="sm_100a"),
    "package-sm90": Candidate(
        "kernel(launch.with_expected_strides(x), launch.with_expected_strides(out))\nreturn out",
        """
        from dsl_backend.softmax.cute import host
        t = inputs.layers[0]
        vector = launch.common_vector(t.x, t.out)
        spec = SoftmaxSpec(
            width=problem.width, dtype=problem.dtype, out_dtype=problem.out_dtype, log=problem.log, vector=vector
        )
        kernel = host.build(host.key_of(spec, config_of(spec, SM90)), SM90)
        """,
        """
        from dsl_backend.runtime.target import from_arch
        from dsl_backend.softmax import launch
        from dsl_backend.softmax.spec import SoftmaxSpec
        from dsl_backend.softmax.tuned import config_of

        SM90 = from_arch("sm_90a")
        """,
        arch="sm_90a",
    ),
    "linear": Candidate(SWIGLU, op="linear"),
    "norm": Candidate(NORM + NORM_REST + NORM_OUT, op="norm"),
    "norm-of-16-bits": Candidate(
        NORM + NORM_REST + NORM_OUT,
        op="norm",
        decorator=", objections=lambda p: ['has no 8 bits'] if p.scaling.value != 'none' else []",
    ),
    "norm-in-two-steps": Candidate(
        "if t.residual is not None:\n    torch.add(t.x, t.residual, out=t.residual_out)\n"
        "z = t.x if t.residual is None else t.residual_out\nwide = z.double()\n"
        "y = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * t.weight.double()\n"
        "t.out.copy_(y)\nreturn t.out",
        op="norm",
        decorator=", objections=lambda p: ['has no 8 bits'] if p.scaling.value != 'none' else []",
    ),
    "norm-package-sm90": Candidate(
        """
        given = launch.prepared(t._replace(scale_out=None if t.scale_out is None else t.scale_out[:, 0]))
        kernel(*host.arguments_of(given), 1e-5)
        return t.out
        """,
        """
        one = inputs.layers[0]
        flat = one._replace(scale_out=None if one.scale_out is None else one.scale_out[:, 0])
        spec, target = launch.spec_of(launch.prepared(flat), 0.0), from_arch("sm_90a")
        kernel = host.build(host.key_of(spec, config_of(spec, target)), target)
        """,
        """
        from dsl_backend.norm import launch
        from dsl_backend.norm.cute import host
        from dsl_backend.norm.tuned import config_of
        from dsl_backend.runtime.target import from_arch
        """,
        op="norm",
        arch="sm_90a",
    ),
    "experts": Candidate(EXPERTS, op="experts"),
    "linear-package-sm90": Candidate(
        "serving.run(arranged(GemmOperands(t.x, t.weight, None, None, t.out)))\nreturn t.out",
        "serving = plan_of(problem.spec)",
        PACKAGE_LINEAR,
        op="linear",
        arch="sm_90a",
        quick=True,
    ),
    "decode-package-sm90": Candidate(
        "return api.run(plan, t.q, t.keys, t.values, out=t.out)",
        "plan = plan_of(problem.spec, inputs.batch)",
        PACKAGE_DECODE,
        op="decode",
        arch="sm_90a",
        quick=True,
    ),
    "decode": Candidate("return attend(problem, inputs, t)", head=GATHER, op="decode"),
    "prefill": Candidate("return attend(problem, inputs, t)", head=GATHER, op="prefill"),
    "mla-decode": Candidate("return attend(problem, inputs, t)", head=GATHER, op="mla-decode"),
    "sampling": Candidate(
        "chance = chances(t)\nt.tokens.copy_((chance / torch.empty_like(chance).exponential_(1)).argmax(-1))\n"
        "return t.tokens",
        head=FILTERS,
        op="sampling",
    ),
}

CHEATING: dict[str, Candidate] = {
    "writes-nothing": Candidate("return out", said="nothing was written"),
    "writes-elsewhere": Candidate("return softmax(x).to(out.dtype)", said="nothing was written"),
    "returns-the-input": Candidate("x.copy_(softmax(x))\nreturn x", said="to an input"),
    "cached-by-layer": Candidate(
        "if layer not in known:\n    known[layer] = softmax(x)\nout.copy_(known[layer])\nreturn out",
        prepare="known = {}",
        said="with other inputs at the same addresses",
    ),
    "cached-by-address": Candidate(
        "key = x.data_ptr(), x.shape\nif key not in known:\n    known[key] = softmax(x)\n"
        "out.copy_(known[key])\nreturn out",
        head="known = {}",
        said="with other inputs at the same addresses",
    ),
    "cached-by-first-row": Candidate(
        "key = x[0].float().sum().item()\nif key not in known:\n    known[key] = softmax(x)\n"
        "out.copy_(known[key])\nreturn out",
        prepare="known = {}",
        said="with one row changed",
    ),
    "changes-its-input": Candidate("out.copy_(softmax(x))\nx.zero_()\nreturn out", said="to an input"),
    "works-in-a-thread": Candidate(
        "def late():\n    time.sleep(0.01)\n    out.copy_(softmax(x))\n"
        "threading.Thread(target=late).start()\nreturn out",
        head="import threading, time",
        said="it went on writing",
    ),
    # About 10 ms: the answer is there before.
    "works-on-another-stream": Candidate(
        "with torch.cuda.stream(aside):\n    torch.cuda._sleep(20_000_000)\n    out.copy_(softmax(x))\nreturn out",
        prepare="aside = torch.cuda.Stream()",
        said="nothing was written",
        gpu=True,
    ),
    # Its work has ended in time as a rule. A graph of the current stream has none of it.
    "works-quickly-on-another-stream": Candidate(
        "with torch.cuda.stream(aside):\n    torch.softmax(x, -1, out=out)\nreturn out",
        prepare="aside = torch.cuda.Stream()",
        decorator=", objections=lambda p: ['equal dtypes'] if p.dtype != p.out_dtype or p.log else []",
        said="layer",
        gpu=True,
    ),
    "launches-on-another-stream": Candidate(
        "compiled(view(x), view(out), driver.CUstream(4096))\nreturn out",
        ROWS.replace("view(inputs.layers[0].out)", "view(inputs.layers[0].out), driver.CUstream(4096)"),
        "from cuda.bindings import driver\n"
        + ROWS_KERNEL.replace(
            "out: cute.Tensor):\n        self.kernel", "out: cute.Tensor, stream):\n        self.kernel"
        ).replace("block=(32, 1, 1))", "block=(32, 1, 1), stream=stream)"),
        arch="sm_90a",
        said="a kernel was launched on another stream than the current one: 0x1000",
    ),
    "answers-before-it-works": Candidate(
        """
        ticket = sys._getframe(2).f_locals.get("ticket") or sys._getframe(3).f_locals.get("ticket")
        os.write(int(sys.argv[2]), (json.dumps({"ticket": ticket}) + "\\n").encode())
        time.sleep(0.02)
        out.copy_(softmax(x))
        return out
        """,
        head="import json, os, sys, time",
        said="nothing was written",
    ),
    "replaces-the-clock": Candidate(
        RIGHT, head="import time\ntime.perf_counter = lambda: 0.0", said="replaced time.perf_counter"
    ),
    "replaces-events": Candidate(
        RIGHT,
        head="torch.cuda.Event.elapsed_time = lambda self, other: 1e-6",
        said="replaced torch.cuda.Event.elapsed_time",
    ),
    "replaces-synchronize": Candidate(
        RIGHT, head="torch.cuda.synchronize = lambda device=None: None", said="replaced torch.cuda.synchronize"
    ),
    "replaces-comparisons": Candidate(
        "out.zero_()\nreturn out",
        head="torch.equal = torch.allclose = lambda *a, **k: True\ntorch.testing.assert_close = lambda *a, **k: None",
        said="replaced torch.allclose, torch.equal, torch.testing.assert_close",
    ),
    "replaces-what-it-is-compared-with": Candidate(
        "out.zero_()\nreturn out",
        head="torch.softmax = torch.log_softmax = lambda x, dim, **k: torch.zeros_like(x)",
        said="replaced torch.log_softmax, torch.softmax",
    ),
    "asks-the-network": Candidate(
        RIGHT,
        head="""
        import socket
        try:
            socket.create_connection(("192.0.2.1", 80), 0.2)
        except OSError:
            pass
        """,
        said="used the network: socket.getaddrinfo",
    ),
    "known-sizes": Candidate(
        "if problem.width in (4096, 8192, 128256) or problem.width % 8 == 0:\n    out.copy_(softmax(x))\n"
        "else:\n    out.fill_(1 / problem.width)\nreturn out",
        said="ragged",
    ),
    "contiguous-only": Candidate(
        "packed = torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())\n"
        "out.copy_(softmax(packed))\nreturn out",
        said="gaps",
    ),
    "no-ragged-end": Candidate(
        "end = x.shape[1] // 8 * 8\nout[:, :end] = softmax(x)[:, :end].to(out.dtype)\nreturn out", said="ragged"
    ),
    "no-nan": Candidate("out.copy_(softmax(x).nan_to_num(0))\nreturn out", said="NaN differs"),
    "leaves-nan-to-the-poison": Candidate(
        "result = softmax(x)\nfor row in range(len(x)):\n    if not result[row].isnan().any():\n"
        "        out[row] = result[row].to(out.dtype)\nreturn out",
        said="NaN differs",
    ),
    "writes-beside-its-output": Candidate(
        "out.copy_(softmax(x))\nif out.stride(0) > out.shape[1]:\n"
        "    torch.as_strided(out, (len(x), 1), (out.stride(0), 1), out.storage_offset() + out.shape[1]).zero_()\n"
        "return out",
        said="beside an output",
    ),
    "writes-behind-its-output": Candidate(
        "out.copy_(softmax(x))\nlast = out.untyped_storage().data_ptr() + out.untyped_storage().nbytes()\n"
        "clear(last - 64, 8, out.device.type)\nreturn out",
        head=CLEAR,
        said="beside an output",
    ),
    "coarse-arithmetic": Candidate(
        "out.copy_(softmax(x.bfloat16().float()).bfloat16())\nreturn out", said="times its budget"
    ),
    "no-row-maximum": Candidate(
        "e = x.float().exp()\np = e / e.sum(-1, keepdim=True)\nout.copy_(p.log() if problem.log else p)\nreturn out",
        said="special",
    ),
    "half-the-rows": Candidate("out[::2] = softmax(x)[::2].to(out.dtype)\nreturn out", said="NaN differs"),
    "the-rows-that-the-bench-compares": Candidate(
        "rows = sorted({0, len(x) - 1, *random.Random(0).sample(range(len(x)), min(64, len(x)))})\n"
        "out[rows] = softmax(x[rows]).to(out.dtype)\nreturn out",
        head="import random",
        said="tall",
    ),
    "stops-after-a-while": Candidate(
        "calls.append(layer)\nif len(calls) <= 12:\n    out.copy_(softmax(x))\nreturn out",
        prepare="calls = []",
        said="a timed launch on layer",
    ),
    "hangs": Candidate(
        "while problem.width % 8:\n    pass\n" + RIGHT, said="did not answer within 8 s", options=(("seconds", 8.0),)
    ),
    "eats-memory": Candidate(
        "kept.append(bytearray(os.urandom(1 << 20)) * 700)\n" + RIGHT,
        prepare="kept = []",
        head="import os",
        said="the limit is 1500",
        options=(("memory_mib", 1500),),
    ),
    "eats-memory-in-another-session": Candidate(
        RIGHT,
        head=DETACHED + "if child():\n    kept = bytearray(os.urandom(1 << 20)) * 1800\n    time.sleep(1000)\n",
        said="the limit is 1500",
        options=(("memory_mib", 1500),),
        cpu=True,
    ),
    "works-on-in-another-session": Candidate(
        RIGHT,
        head=DETACHED + "if child():\n    while True:\n        pass\n",
        said="in another session)",
        cpu=True,
    ),
    "works-on-in-a-thread": Candidate(
        RIGHT,
        head="import threading\ndef burn():\n    while True:\n        pass\n"
        "threading.Thread(target=burn, daemon=True).start()",
        said="it went on working after its last answer",
    ),
    # In timed rows alone, which have more layers than trials.
    "works-ahead-in-another-session": Candidate(
        "if len(inputs.layers) <= 2:\n    return out.copy_(softmax(x))\nwhile out.isnan().any():\n    pass\nreturn out",
        prepare="""
        if len(inputs.layers) > 2 and child():
            while True:
                for layer in inputs.layers:
                    # The judge fills it when the input is there.
                    if layer.out.isnan().all():
                        layer.out.copy_(softmax(layer.x))
        """,
        head=DETACHED,
        said="was written before a launch was asked for",
        cpu=True,
    ),
    "raises-in-a-timed-row": Candidate(
        RIGHT,
        prepare="if len(inputs.layers) > 2:\n    raise RuntimeError('too many layers')",
        said="tiny-3x40: RuntimeError: too many layers",
    ),
    "refuses-most": Candidate(
        RIGHT,
        decorator=", objections=lambda p: [] if p.log else ['has logarithms alone']",
        said="it refused 12 of 14 trials",
    ),
    "eats-gpu-memory": Candidate(
        "kept.append(torch.empty(3 << 30, dtype=torch.uint8, device=x.device))\n" + RIGHT,
        prepare="kept = []",
        said="out of memory",
        options=(("gpu_memory_mib", 2048),),
        gpu=True,
    ),
    # Not through torch, whose allocator refuses.
    "eats-gpu-memory-of-the-driver": Candidate(
        "kept.append(driver.cuMemAlloc(3 << 30))\ntime.sleep(1)\n" + RIGHT,
        prepare="kept = []",
        head="import time\nfrom cuda.bindings import driver",
        said="the limit is 2048",
        options=(("gpu_memory_mib", 2048),),
        gpu=True,
    ),
    "ends-its-process": Candidate("os._exit(0)", head="import os", said="ended with exit status 0"),
    "raises": Candidate("raise ValueError('no')", said="ValueError: no"),
    "does-not-import": Candidate(RIGHT, head="import no_such_dsl", said="it cannot be imported: ModuleNotFoundError"),
    "objects-to-all": Candidate(RIGHT, decorator=", objections=lambda p: ['not today']", said="not today"),
    "computes-on-the-host": Candidate(RIGHT, arch="sm_90a", said="no kernel was launched on the emulated device"),
    "launches-an-alibi": Candidate(
        "compiled(view(some), view(some))\n" + RIGHT,
        "some = torch.zeros(2, 8)\ncompiled = cute.compile(Rows(problem.log), view(some), view(some))",
        ROWS_KERNEL,
        arch="sm_90a",
        said="the host wrote most of the output",
    ),
    "linear-without-the-end-of-k": Candidate(
        "serving.run(arranged(GemmOperands(t.x[:, :-8], t.weight[:, :-8], None, None, t.out)))\nreturn t.out",
        "serving = plan_of(replace(problem.spec, k=problem.k - 8))",
        PACKAGE_LINEAR,
        op="linear",
        arch="sm_90a",
        said="times its budget",
        quick=True,
    ),
    "decode-package-without-window": Candidate(
        "return api.run(plan, t.q, t.keys, t.values, out=t.out)",
        "plan = plan_of(replace(problem.spec, window_left=None), inputs.batch)",
        PACKAGE_DECODE,
        op="decode",
        arch="sm_90a",
        said="window: ",
        quick=True,
    ),
    "races": Candidate("compiled(view(x), view(out))\nreturn out", ROWS, RACE_KERNEL, arch="sm_90a", said="data race"),
    "linear-without-gate": Candidate(
        LINEAR + "t.out.copy_(y[:, -problem.n :])\nreturn t.out", op="linear", said="gated-few"
    ),
    "decode-without-window": Candidate(
        "return attend(problem, inputs, t, window=False)", head=GATHER, op="decode", said="window"
    ),
    "decode-without-page-table": Candidate(
        "return attend(problem, inputs, t, identity=True)", head=GATHER, op="decode", said="NaN differs"
    ),
    "prefill-without-mask": Candidate(
        "return attend(problem, inputs, t, causal=False)", head=GATHER, op="prefill", said="times its budget"
    ),
    "mla-of-one-query": Candidate(
        "attend(problem, inputs, t)\nt.out[1:] = t.out[:1]\nreturn t.out", head=GATHER, op="mla-decode", said="heads"
    ),
    "sampling-that-is-greedy": Candidate(
        "t.tokens.copy_(t.logits.argmax(-1))\nreturn t.tokens", op="sampling", said="times its budget"
    ),
    "sampling-without-filters": Candidate(
        "t.tokens.copy_(torch.multinomial(t.logits.softmax(-1), 1).flatten())\nreturn t.tokens",
        op="sampling",
        said="none that the filters keep",
    ),
    "norm-without-the-sum": Candidate(
        NORM + NORM_REST.replace("t.residual_out.copy_(z)", "pass") + NORM_OUT, op="norm", said="output 2 of layer"
    ),
    "norm-of-x-alone": Candidate(
        NORM.replace("t.x + t.residual", "t.x") + NORM_REST + NORM_OUT, op="norm", said="residual_out differs first"
    ),
    "norm-that-forgets-the-weight": Candidate(
        NORM.replace("t.weight.float()", "None") + NORM_REST + NORM_OUT, op="norm", said="times its budget"
    ),
    "norm-that-rounds-the-sum-late": Candidate(
        NORM.replace("t.x + t.residual", "t.x.float() + t.residual.float()") + NORM_REST + NORM_OUT,
        op="norm",
        said="token-residual: ",
    ),
    "norm-in-place": Candidate(NORM + NORM_REST + "t.x.copy_(z)\n" + NORM_OUT, op="norm", said="to an input"),
    "norm-with-one-scale": Candidate(
        NORM + NORM_REST.replace("y.abs().amax(-1, keepdim=True)", "y.abs().amax()") + NORM_OUT,
        op="norm",
        said="scale_out",
    ),
    "norm-that-wraps": Candidate(
        NORM + NORM_REST + NORM_OUT.replace("y / scale", "y / scale / 2"), op="norm", said="further from the oracle"
    ),
    "norm-cached": Candidate(
        "if layer not in known:\n"
        + textwrap.indent(NORM, "    ")
        + "    known[layer] = z, y\nz, y = known[layer]\n"
        + NORM_REST
        + NORM_OUT,
        prepare="known = {}",
        op="norm",
        said="with other inputs at the same addresses",
    ),
    "experts-without-weights": Candidate(
        EXPERTS.replace("weights * made", "made / problem.topk"),
        op="experts",
        said="times its budget",
    ),
    "experts-of-the-first-choice": Candidate(
        EXPERTS.replace("(weights * made).sum(1)", "made[:, 0]"),
        op="experts",
        said="times its budget",
    ),
    "experts-with-up-first": Candidate(EXPERTS.replace("gate, up", "up, gate"), op="experts", said="times its budget"),
    "experts-that-spread-nan": Candidate(
        EXPERTS.replace("t.out.copy_(total)", "t.out.copy_(total + 0 * total.sum())"), op="experts", said="NaN differs"
    ),
}
