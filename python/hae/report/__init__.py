"""hae-report: one self-contained page of what a comparison measured (docs/report.md)."""
