"""Run native code: handlers generated as LLVM IR, the driver loop, and their contract with Python."""
