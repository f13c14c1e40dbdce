"""
One request of a client, whatever its API.

    apis           a request path or the shape of a body -> the API; one record per API of how its requests are built
    document       a body and its API -> a `Document`: items in prompt order, and where each value stands in the raw
                   text
    message        a decoded item -> its role and texts
    tools          a list of tools -> their names and descriptions
    chat_template  a model's chat template -> its role markers; a raw prompt -> its turns
"""
