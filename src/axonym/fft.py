"""Fourier transforms by name: `axonym.ops.fft` under the name that existing code imports it by."""

from .ops.fft import (
    fft as fft,
    fftfreq as fftfreq,
    fftshift as fftshift,
    hfft as hfft,
    ifft as ifft,
    ifftshift as ifftshift,
    ihfft as ihfft,
    irfft as irfft,
    rfft as rfft,
    rfftfreq as rfftfreq,
)
