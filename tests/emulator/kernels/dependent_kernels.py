# SPDX-License-Identifier: Apache-2.0
"""Kernels that wait for the launch before them, or do not."""

import cutlass
from cutlass import cute

THREADS = 64


class Step:
    """y = 2 x + 1 over vectors of float32, by the actions given, in their order.

    Args:
        actions: `wait`, `launch_dependents`, `load`, `store`, `sync`, `count`, which adds 1 to the first element of
            x, and `beyond`, which stores where no tensor is; a number in front means that only this warp does it.
        pdl: launched with programmatic stream serialization.
    """

    def __init__(self, actions: str, *, pdl: bool = True) -> None:
        self.actions, self.pdl = actions.split(), pdl

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor):
        self.kernel(x, y).launch(
            grid=(cute.ceil_div(cute.size(x), THREADS), 1, 1), block=(THREADS, 1, 1), use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        index = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        value = cute.make_rmem_tensor(1, cutlass.Float32)
        for number in cutlass.range_constexpr(len(self.actions)):
            action = cutlass.const_expr(self.actions[number])
            if cutlass.const_expr(action[0].isdigit()):
                if cute.arch.warp_idx() == int(action[0]):
                    self.act(cutlass.const_expr(action[1:]), x, y, index, value)
            else:
                self.act(action, x, y, index, value)

    @cute.jit
    def act(
        self, action: cutlass.Constexpr[str], x: cute.Tensor, y: cute.Tensor, index: cutlass.Int32, value: cute.Tensor
    ):
        if cutlass.const_expr(action == "wait"):
            cute.arch.griddepcontrol_wait()
        elif cutlass.const_expr(action == "launch_dependents"):
            cute.arch.griddepcontrol_launch_dependents()
        elif cutlass.const_expr(action == "sync"):
            cute.arch.sync_threads()
        elif cutlass.const_expr(action == "load"):
            value[0] = x[index]
        elif cutlass.const_expr(action == "store"):
            y[index] = value[0] * 2.0 + 1.0
        elif cutlass.const_expr(action == "beyond"):
            y[index + (1 << 28)] = value[0]
        elif cutlass.const_expr(action == "count"):
            cute.arch.atomic_add(x.iterator, cutlass.Float32(1.0))
        else:
            raise ValueError(action)
