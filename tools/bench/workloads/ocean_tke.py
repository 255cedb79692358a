"""One step of turbulent kinetic energy on an ocean grid, in float64: a stencil with 21 inputs.

The closure is that of Gaspar, Gregoris and Lefevre (1990), as ocean models use it, on a grid of x, y and depth,
256x256x16. Our own definition of the step that the kernel of this name in pyhpc-benchmarks takes. All inputs are
float64 but the number of the lowest wet level, an int64. README.md describes the step and lists differences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .registry import Made, workload

SHAPE = (256, 256, 16)


@dataclass(frozen=True)
class Constants:
    """Constants of the closure and the time step, SI units."""

    dt: float = 1.0
    alpha: float = 30.0  # diffusivity of energy over that of momentum
    c_eps: float = 0.7
    lateral: float = 2000.0  # diffusivity, m^2/s
    stabilizer: float = 0.1  # of Adams-Bashforth


CONSTANTS = Constants()


def tke_step(
    u: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor,
    mask_u: torch.Tensor,
    mask_v: torch.Tensor,
    mask_w: torch.Tensor,
    dxt: torch.Tensor,
    dxu: torch.Tensor,
    dyt: torch.Tensor,
    dyu: torch.Tensor,
    dzt: torch.Tensor,
    dzw: torch.Tensor,
    cos_t: torch.Tensor,
    cos_u: torch.Tensor,
    bottom: torch.Tensor,
    kappa: torch.Tensor,
    mixing_length: torch.Tensor,
    forcing: torch.Tensor,
    surface_forcing: torch.Tensor,
    tke: torch.Tensor,
    tendency_before: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New energy, its advective tendency, and the correction at the surface.

    ``bottom`` is the number of the lowest wet level, from 1, and 0 on land. Fields are [x, y, z], grid spacings have
    one of the three dimensions, ``bottom`` and ``surface_forcing`` are [x, y].
    """
    c = CONSTANTS
    *system, wet = vertical_system(dzt, dzw, bottom, kappa, mixing_length, forcing, surface_forcing, tke)
    mixed = torch.where(wet, solve_columns(*system), tke)
    surface = mixed[:, :, -1]
    correction = torch.clamp(-surface, min=0.0) * dzw[-1] * 0.5
    mixed = torch.cat([mixed[:, :, :-1], torch.clamp(surface, min=0.0).unsqueeze(2)], dim=2)

    flux_x = c.lateral * _forward(tke, 0) / (cos_t[None, :, None] * dxu[:, None, None]) * mask_u
    flux_y = c.lateral * _forward(tke, 1) / dyu[None, :, None] * mask_v * cos_u[None, :, None]
    metric_x = cos_t[None, :, None] * dxt[:, None, None]
    metric_y = (cos_t * dyt)[None, :, None]
    spread = (_backward(flux_x, 0) / metric_x + _backward(flux_y, 1) / metric_y) * mask_w

    east = superbee_flux(u, tke, mask_u, cos_t[None, :, None] * dxu[:, None, None], 0)
    north = superbee_flux(v, tke, mask_v, dyu[None, :, None], 1) * cos_u[None, :, None]
    up = superbee_flux(w, tke, mask_w, dzw[None, None, :], 2)
    inflow = _backward(east, 0) / metric_x + _backward(north, 1) / metric_y + _backward(up, 2) / dzw[None, None, :]
    tendency = -inflow * mask_w

    ahead = (1.5 + c.stabilizer) * tendency - (0.5 + c.stabilizer) * tendency_before
    return mixed + c.dt * (_inside(spread) + _inside(ahead)), tendency, correction


def vertical_system(
    dzt: torch.Tensor,
    dzw: torch.Tensor,
    bottom: torch.Tensor,
    kappa: torch.Tensor,
    mixing_length: torch.Tensor,
    forcing: torch.Tensor,
    surface_forcing: torch.Tensor,
    tke: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three diagonals and the right side of implicit mixing and dissipation, and which cells are wet."""
    c = CONSTANTS
    levels = tke.shape[2]
    level = torch.arange(levels, device=tke.device)
    lowest = (bottom - 1).unsqueeze(2)
    wet = (level >= lowest) & (lowest >= 0)
    above_bottom = level > lowest
    # Exchange across the interface above each level; none at the surface.
    exchange = c.dt * c.alpha * 0.5 * (kappa[:, :, :-1] + kappa[:, :, 1:]) / dzt[1:]
    to_upper = F.pad(exchange, (0, 1))
    to_lower = torch.where(above_bottom, F.pad(exchange, (1, 0)), 0.0)
    depth = torch.where(level == levels - 1, 0.5 * dzw, dzw)  # the uppermost cell is half a cell
    decay = c.dt * c.c_eps * torch.sqrt(torch.clamp(tke, min=0.0)) / mixing_length
    source = tke + c.dt * forcing
    source = source + torch.where(level == levels - 1, (c.dt * surface_forcing).unsqueeze(2) / depth, 0.0)
    lower = torch.where(wet, -to_lower / depth, 0.0)
    upper = torch.where(wet, -to_upper / depth, 0.0)
    diagonal = torch.where(wet, 1.0 + (to_lower + to_upper) / depth + decay, 1.0)
    return lower, diagonal, upper, torch.where(wet, source, 0.0), wet


def solve_columns(
    lower: torch.Tensor, diagonal: torch.Tensor, upper: torch.Tensor, right: torch.Tensor
) -> torch.Tensor:
    """Solves tridiagonal systems along the last dimension, by elimination and substitution."""
    levels = diagonal.shape[-1]
    ratios = [upper[..., 0] / diagonal[..., 0]]
    values = [right[..., 0] / diagonal[..., 0]]
    for k in range(1, levels):
        scale = 1.0 / (diagonal[..., k] - lower[..., k] * ratios[-1])
        ratios.append(upper[..., k] * scale)
        values.append((right[..., k] - lower[..., k] * values[-1]) * scale)
    solution = [values[-1]]
    for k in range(levels - 2, -1, -1):
        solution.append(values[k] - ratios[k] * solution[-1])
    return torch.stack(solution[::-1], dim=-1)


def superbee_flux(
    velocity: torch.Tensor, field: torch.Tensor, mask: torch.Tensor, spacing: torch.Tensor, dim: int
) -> torch.Tensor:
    """Flux of ``field`` through the far face of each cell along ``dim``; none through the faces next to the rim."""
    size = field.shape[dim]
    before, here, ahead, beyond = (field.narrow(dim, start, size - 3) for start in range(4))
    speed = velocity.narrow(dim, 1, size - 3)
    open_face = mask.narrow(dim, 1, size - 3)
    gap = spacing.expand_as(field).narrow(dim, 1, size - 3)
    courant = torch.abs(speed * CONSTANTS.dt / gap)
    step = (ahead - here) * open_face
    behind = (here - before) * mask.narrow(dim, 0, size - 3)
    in_front = (beyond - ahead) * mask.narrow(dim, 2, size - 3)
    upwind = torch.where(speed > 0, behind, in_front)
    ratio = upwind / torch.where(torch.abs(step) < 1e-20, 1e-20, step)
    limiter = torch.clamp(torch.maximum(torch.clamp(2.0 * ratio, max=1.0), torch.clamp(ratio, max=2.0)), min=0.0)
    flux = speed * 0.5 * (here + ahead) - torch.abs(speed) * ((1.0 - limiter) + courant * limiter) * 0.5 * step
    padding = [0] * (2 * (field.dim() - 1 - dim)) + [1, 2]
    return F.pad(flux * open_face, padding)


def _forward(field: torch.Tensor, dim: int) -> torch.Tensor:
    """Differences to the next cell; zero at the end."""
    return F.pad(torch.diff(field, dim=dim), [0] * (2 * (field.dim() - 1 - dim)) + [0, 1])


def _backward(flux: torch.Tensor, dim: int) -> torch.Tensor:
    """Differences to the cell before; the first cell has nothing before it."""
    shape = [0] * (2 * (flux.dim() - 1 - dim)) + [1, 0]
    return flux - F.pad(flux, shape).narrow(dim, 0, flux.shape[dim])


def _inside(field: torch.Tensor) -> torch.Tensor:
    """Zero in the two cells at the rim of x and y."""
    return F.pad(field[2:-2, 2:-2], (0, 0, 2, 2, 2, 2))


@workload("TKE", mode="inference", batch=1048576, autocast=False)
def build(*, shape: tuple[int, int, int] = SHAPE) -> Made:
    """Turbulent kinetic energy step of an ocean model, float64, 1048576 points, 21 inputs"""
    nx, ny, nz = shape

    def field(*size: int, low: float, high: float) -> torch.Tensor:
        return torch.rand(size, dtype=torch.float64) * (high - low) + low

    return tke_step, (
        *(field(*shape, low=-1e-2, high=1e-2) for _ in range(3)),
        *((field(*shape, low=0.0, high=1.0) < 0.9).double() for _ in range(3)),
        *(field(nx, low=9e3, high=11e3) for _ in range(2)),
        *(field(ny, low=9e3, high=11e3) for _ in range(2)),
        *(field(nz, low=8.0, high=12.0) for _ in range(2)),
        *(field(ny, low=0.5, high=1.0) for _ in range(2)),
        torch.randint(0, nz, (nx, ny)),
        field(*shape, low=1e-5, high=1e-2),
        field(*shape, low=1e-1, high=1e1),
        field(*shape, low=-1e-8, high=1e-6),
        field(nx, ny, low=-1e-6, high=1e-4),
        field(*shape, low=0.0, high=1e-3),
        field(*shape, low=-1e-8, high=1e-8),
    )
