"""GPU kernels without a call: ahead-of-time compilation, the record of registers and spills, and measured block sizes."""
