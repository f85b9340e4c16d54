"""The serving wire messages, in a descriptor pool of their own so that tensorflow can be imported beside them.

The full names are the original ones (`tensorflow.serving.PredictRequest` and so on), as clients, `Any` type URLs and
server reflection expect; registered in protobuf's default pool they would make `import tensorflow_serving` fail.
`generate.py` writes the modules here from the `.proto` files.
"""
