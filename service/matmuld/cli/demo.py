from pydantic import BaseModel
class Demo(BaseModel):
    def run(self)->int: return 0
