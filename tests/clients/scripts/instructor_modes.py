"""instructor's modes: an invalid object is requested again, then one arrives in parts."""

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel, field_validator

QUESTION = [{"role": "user", "content": "How warm is it in Rome?"}]
# In the order of the model's answers. All modes but the last prescribe the output's form.
MODES = ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "RESPONSES_TOOLS", "MD_JSON")


class Weather(BaseModel):
    city: str
    degrees: int

    @field_validator("degrees")
    @classmethod
    def _possible(cls, degrees: int) -> int:
        if degrees > 60:
            raise ValueError("nowhere is it that warm")
        return degrees


for name in MODES:
    server = OpenAI(base_url=os.environ["BASE_URL"], api_key="none")
    client = instructor.from_openai(server, mode=instructor.Mode[name])
    found = client.create(model="demo", messages=QUESTION, response_model=Weather, max_retries=2)
    assert (found.city, found.degrees) == ("Rome", 21)
    *_, last = client.create_partial(model="demo", messages=QUESTION, response_model=Weather)
    assert (last.city, last.degrees) == ("Rome", 21)
