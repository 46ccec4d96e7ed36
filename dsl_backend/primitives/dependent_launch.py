# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch: what a kernel does beside the kernels before it, and when the next one may start.

A kernel launched with `use_pdl=True` may start when every CTA of the kernel before it has called `launch_dependents` or
has ended. Kernels further back may still run as well. docs/dependent-launch.md has the contract, and what each kernel
does before it waits; the emulator checks it. In short:

- Before `wait`, a kernel reads weights and nothing else of global memory, and it writes none of it; except behind a
  kernel that is always launched with it and waits before it calls `launch_dependents`.
- A thread of every CTA waits, also of one without work. Its other threads access global memory once they have waited
  or a barrier has told them.
- A kernel allocates its tensor memory before it calls `launch_dependents`, unless the next kernel surely has none.

Sources: PTX ISA 9.2, 9.7.13.13 (griddepcontrol).
"""

from cutlass import cute


def wait() -> None:
    """Wait until the kernel before this one has completed and what it wrote is visible to all CTAs."""
    cute.arch.griddepcontrol_wait()


def launch_dependents() -> None:
    """Let the next kernel start, once all CTAs have said so; the first call of a CTA counts.

    It orders no access to memory: the next kernel waits for this one's end.
    """
    cute.arch.griddepcontrol_launch_dependents()
