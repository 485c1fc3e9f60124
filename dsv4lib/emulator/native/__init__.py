"""Run native code. Handlers generated as LLVM IR, the driver loop, and their contract with Python."""
