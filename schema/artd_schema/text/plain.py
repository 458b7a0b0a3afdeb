"""Text of users and models for a terminal: control characters are shown, not obeyed."""

from __future__ import annotations

CONTROLS = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for code in (
        *range(32), *range(127, 160), 0x061C, 0x200B, 0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F), 0x2060,
        *range(0x2066, 0x206A), 0xFEFF, *range(0xD800, 0xE000),
    )
}  # fmt: skip
"""Code point -> visible text, for characters that move the cursor, start an escape sequence, change the direction of text, or are no characters."""


def plain(text: str) -> str:
    """Return text of users and models for a terminal, on one line. Control characters are made visible."""
    return text.translate(CONTROLS)


def paragraph(text: str) -> list[str]:
    """Return the lines of a text of users or models for a terminal: newlines and tabs count, other control characters are made visible."""
    return [plain(line.expandtabs(4)) for line in text.split("\n")]
