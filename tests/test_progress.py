"""Progress lines: what they say of slow work."""

from alphastomics.progress import ProgressLines


def test_a_slow_rate_does_not_read_as_zero():
    lines = ProgressLines("sample", 100, "network calls")
    lines.advance(2)
    assert "0.2 network calls/s" in lines.line(lines.started + 10)
    assert "2,000 network calls/s" in lines.line(lines.started + 0.001)
