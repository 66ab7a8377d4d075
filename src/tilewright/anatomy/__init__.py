"""A kernel taken apart: its launches captured, compiled, disassembled, and its programs followed one by one."""
