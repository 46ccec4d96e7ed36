# SPDX-License-Identifier: Apache-2.0
"""The products of experts on SM90: grouped GEMMs, and those for few tokens."""
