"""Numbers as people read them, for messages, `doctor` and the report."""


def format_bytes(num_bytes: float) -> str:
    """Bytes in binary units with three digits or so: 512 B, 1.5 KiB, 5.99 GiB."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.3g} {unit}" if abs(num_bytes) < 1000 else f"{num_bytes:.0f} {unit}"
    return f"{num_bytes / 1024:.3g} TiB"


def format_count(count: float) -> str:
    """A count in thousands, millions or billions: 950, 1.2k, 135M, 7.6B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """A duration: 0.25 s, 12.3 s, 4 min 05 s, 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
