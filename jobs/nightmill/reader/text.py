"""Text that every reader and writer can hold."""


def valid_unicode(text: str) -> str:
    """Replace lone surrogates by U+FFFD: JSON can spell them, UTF-8 and so Arrow cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def sanitized(text: str) -> str:
    """Also replace NUL, which tokenizers and databases cut strings at."""
    return valid_unicode(text).replace("\x00", "\ufffd")
