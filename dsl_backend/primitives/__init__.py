# SPDX-License-Identifier: Apache-2.0
"""What kernels are made of: pieces of device code in CuTe DSL that belong to no operator."""
