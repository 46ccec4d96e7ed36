# SPDX-License-Identifier: Apache-2.0
"""A linear layer in each DSL: x @ weight.T, and SwiGLU of two such products. A module imports its DSL."""
