"""Answers requests over HTTP, as the OpenAI API has them; nothing here computes.

openai_requests     bodies of requests become prompts and sampling parameters; what is refused
openai_responses    answers, and pieces of them, as JSON
answer_text         the text of one answer, token by token, up to a stop string
request_queue       between the server's thread and generation: requests there, tokens back
openai_app          the routes, with the API key, streams, and clients that go away
http_server         the address, and uvicorn in a thread
"""
