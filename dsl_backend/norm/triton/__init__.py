# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of RMSNorm."""
