# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernel of RMSNorm."""
