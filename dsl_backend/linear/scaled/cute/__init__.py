# SPDX-License-Identifier: Apache-2.0
"""Linear layers of quantised operands by the CuTe DSL GEMMs."""
