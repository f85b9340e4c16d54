def soak(report, options, folder):
    raise NotImplementedError
