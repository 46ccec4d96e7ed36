# SPDX-License-Identifier: Apache-2.0
"""Causal attention over requests of one length in each DSL. A module imports its DSL."""
