"""The operations of `tp.kernels` as Triton kernels, one a file; imported where one is used, since each imports Triton.

All of them: float32, bfloat16 and float16; arithmetic in float32, rounded where the plain form rounds; rows at any
stride, with 64-bit offsets; any number of rows, none included. Launched on the device of their tensors.
"""
