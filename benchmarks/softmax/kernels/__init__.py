# SPDX-License-Identifier: Apache-2.0
"""Softmax of contiguous rows in each DSL. A module imports its DSL."""
