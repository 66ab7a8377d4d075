"""Factorizations and solutions of linear systems: calls of LAPACK or its like.

FLOPs are the leading terms of Golub and Van Loan, Matrix Computations; those of iterations are not known.
"""

from __future__ import annotations

from functools import partial

from tilewright.operators.arithmetic import Arithmetic, CallSizes, Count, elements, nothing, per_result
from tilewright.operators.row import calls


def _cubic(share: int, of: int) -> Arithmetic:
    """share / of · n³ for each n × n matrix."""

    def flops(sizes: CallSizes) -> Count:
        *_, n = sizes.operand()
        return share * elements(sizes.operand()) * n // of

    return Arithmetic(flops, nothing)


def _solution(times: int) -> Arithmetic:
    """`times` n² for each column of the result."""
    return Arithmetic(lambda sizes: times * elements(sizes.result()) * sizes.operand()[-1], nothing)


def _householder(sizes: CallSizes) -> Count:
    *batch, rows, columns = sizes.operand()
    short, long = sorted((rows, columns), key=sizes.number)
    return elements(tuple(batch)) * (2 * long * short * short - 2 * short * short * short // 3)


factorizations = partial(calls, operator_class="library", shapes=None, priced=False)
factorizations(
    "linalg_cholesky_ex.default(self, upper, check_errors)\ncholesky.default(self, upper)", arithmetic=_cubic(1, 3)
)
factorizations(
    """
    linalg_lu.default(A, pivot)
    linalg_lu_factor_ex.default(A, pivot, check_errors)
    _linalg_det.default(A)
    _linalg_slogdet.default(A)
    _linalg_solve_ex.default(A, B, left, check_errors)
    """,
    arithmetic=_cubic(2, 3),
    # Which rows are exchanged depends on comparisons.
    discontinuous=True,
)
factorizations("linalg_inv_ex.default(A, check_errors)\ncholesky_inverse.default(self, upper)", arithmetic=_cubic(2, 1))
factorizations("linalg_qr.default(A, mode)\ngeqrf.default(self)", arithmetic=Arithmetic(_householder, nothing))
factorizations("linalg_solve_triangular.default(self, B, upper, left, unitriangular)", arithmetic=_solution(1))
factorizations("triangular_solve.default(self, A, upper, transpose, unitriangular)", arithmetic=_solution(1))
factorizations(
    """
    linalg_lu_solve.default(LU, pivots, B, left, adjoint)
    cholesky_solve.default(self, input2, upper)
    """,
    arithmetic=_solution(2),
)
factorizations("linalg_cross.default(self, other, dim)", arithmetic=per_result(3))
factorizations(
    """
    _linalg_svd.default(A, full_matrices, compute_uv, driver)
    _linalg_eigh.default(A, UPLO, compute_v)
    linalg_eig.default(self)
    linalg_householder_product.default(input, tau)
    linalg_ldl_factor_ex.default(self, hermitian, check_errors)
    linalg_lstsq.default(self, b, rcond, driver)
    linalg_matrix_exp.default(self)
    linalg_pinv.atol_rtol_tensor(self, atol, rtol, hermitian)
    lu_unpack.default(LU_data, LU_pivots, unpack_data, unpack_pivots)
    ormqr.default(self, input2, input3, left, ...)
    linalg_ldl_solve.default(LD, pivots, B, hermitian)
    """,
    # The sign of a vector, or the rank.
    discontinuous=True,
)
