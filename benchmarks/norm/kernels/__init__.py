# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of contiguous rows in each DSL. A module imports its DSL."""
