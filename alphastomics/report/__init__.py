"""The report: a trained model and cells enter, one self-contained HTML file leaves."""
