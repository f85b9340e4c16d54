def system(report, options, folder):
    raise NotImplementedError
