# SPDX-License-Identifier: Apache-2.0
"""How long a kernel takes: what its warps did on the emulator, replayed on a model of a chip.

with emulator.device("sm_90a", sms=132, schedule="clock") as device:
    compiled(a, b, c)
print(emulator.clock.report.text(device.machine.times))
"""
