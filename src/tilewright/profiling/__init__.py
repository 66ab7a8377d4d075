"""`tilewright profile`: a case (`steps`), a program (`program`) or a block of code (`block`), recorded into a run."""
