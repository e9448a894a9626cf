"""Other programs and simple methods on the same slices, by the same script, beside this one.

One module per task: `positions`, `expression`, `imputation`, `generation`; and `scale`. Each method
runs in a process of its own (`processes`), on the cells of `slices`. Peers are optional: the extra
`peers` installs them, and a method whose package is missing is left out, with a line that says so.
"""
