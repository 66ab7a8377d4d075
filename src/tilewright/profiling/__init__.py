"""`tilewright profile` records a case (`steps`), a program (`program`) or a block of code (`block`) into a run."""
