"""`engine route`: one address over engines that compute prompts and engines that go on from their KV."""
