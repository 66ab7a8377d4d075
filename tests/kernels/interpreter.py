"""Triton's interpreter as its kernels need it: a scalar given to a kernel counts in `range`."""

from typing import Any

from triton.runtime import interpreter


def install() -> None:
    """Patch Triton's interpreter in this process, permanently.

    It keeps a scalar as an array of one, which NumPy from 2.4 on does not convert to a number.
    """
    patch_tensor = interpreter._patch_lang_tensor

    def scalars_as_integers(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda own: int(own.handle.data.item()))

    interpreter._patch_lang_tensor = scalars_as_integers
