"""The quadratic model of one batch, m(p), and its damped minimizers: `quadratic.at(damping)`."""
