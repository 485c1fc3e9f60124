"""The residual's addition, the norm behind it and the quantisation of the normed row, in one launch."""
