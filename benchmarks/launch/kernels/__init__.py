# SPDX-License-Identifier: Apache-2.0
"""One kernel in each DSL: out = x + 1. A module imports its DSL."""
