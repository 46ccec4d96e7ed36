# SPDX-License-Identifier: Apache-2.0
"""`dsl-backend bench dsls`: DSLs compared. Tables of operators, the cost of a launch, compile times, lines of code.

The tables are those that the field compares DSLs by: softmax over 28 shapes, products over their depth, SwiGLU layers,
and attention over lengths. They are rows of the operators' own benchmarks.
"""

NAME = "dsls"
