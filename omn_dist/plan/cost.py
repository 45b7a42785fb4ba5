"""What a matrix costs its owner: floating-point operations of the Newton-Schulz form that will run."""


def newton_schulz_flops(num_rows: int, num_columns: int, num_steps: int) -> int:
    """FLOPs of the standard form: ``k (4 s^2 l + 2 s^3)`` for short side s, long side l and k steps.

    Each step makes the Gram matrix (2 s^2 l), its square (2 s^3) and one rectangular product (2 s^2 l).
    """
    short, long = sorted((num_rows, num_columns))
    return num_steps * (4 * short * short * long + 2 * short**3)
