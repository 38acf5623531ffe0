"""Linear algebra over named axes."""

from .ops.linalg import (
    cholesky as cholesky,
    cond as cond,
    det as det,
    eig as eig,
    eigh as eigh,
    eigvals as eigvals,
    eigvalsh as eigvalsh,
    expm as expm,
    inv as inv,
    lstsq as lstsq,
    matrix_power as matrix_power,
    matrix_rank as matrix_rank,
    norm as norm,
    pinv as pinv,
    qr as qr,
    slogdet as slogdet,
    solve as solve,
    svd as svd,
)
