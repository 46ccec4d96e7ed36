# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL softmax for SM90 and SM100."""
