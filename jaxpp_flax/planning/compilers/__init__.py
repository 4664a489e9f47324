"""The compilers of TPUs and NVIDIA GPUs, for devices that are not here."""
